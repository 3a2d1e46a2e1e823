"""Pretrain a GPT: torchrun --nproc-per-node N pretrain_gpt.py --num-layers ... (README has a whole line; --help lists every flag).

This file is what one step is made of: which datasets, which model, what a batch is, what the loss is. `pretrain` does the rest: command
line, processes, optimizer, loop, checkpoints, logs. A step (megatron/training/train_step.py) calls `forward_step` for each micro batch,
normalises its loss and runs it backward (core/pipeline_parallel/schedules.py), reduces the gradients, and updates the weights.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megatron.core import device, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams, document_begins, packed_seq_params_of
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import mtp_reports
from megatron.core.utils import get_batch_on_this_cp_rank, unwrap_model
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.arguments import core_transformer_config_from_args, gpt_dataset_config_from_args
from megatron.training.config.checks_layout import packs_documents
from megatron.training.datasets.fim_dataset import GPTFIMDataset
from megatron.training.datasets.sft_dataset import SFTDataset

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, PackedSeqParams | None]
NO_BATCH: Any = (None,) * 6


def train_valid_test_datasets_provider(train_valid_test_num_samples: list[int]) -> list[Any]:
    """The training, validation and test sets; each sample is a window of seq_length tokens cut from shuffled documents, or with --sft some
    whole conversations."""
    args = get_args()
    config = gpt_dataset_config_from_args(args, get_tokenizer())
    kinds: dict[str, Any] = {"mock_data": MockGPTDataset, "sft": SFTDataset, "fim_data": GPTFIMDataset}
    dataset_class = next((kind for dest, kind in kinds.items() if getattr(args, dest)), GPTDataset)
    return BlendedMegatronDatasetBuilder(dataset_class, train_valid_test_num_samples, lambda: True, config).build()


train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # every rank builds; the builder orders them


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> GPTModel:
    """The part of the model that this rank holds, in fp32 on the device it trains on, with its initial weights."""
    args = get_args()
    config = core_transformer_config_from_args(args)
    config.logical_vocab_size, config.softmax_vocab_size = get_tokenizer().vocab_size, args.softmax_vocab_size
    use_te = args.transformer_impl == "transformer_engine"
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=use_te, vp_stage=vp_stage)
    with torch.device(device.current_device()):
        return GPTModel(
            config=config,
            transformer_layer_spec=block,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=args.rope_scaling_factor,
            seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
            mtp_block_spec=get_gpt_mtp_block_spec(config, block, use_transformer_engine=use_te, vp_stage=vp_stage),
            vp_stage=vp_stage,
            pg_collection=pg_collection,
        )


def get_batch(data_iterator: Iterator, eod: int | None = None) -> Batch:
    """The next micro batch on the device: tokens, labels, loss mask, attention mask (None: causal alone), positions, each [b, s]; and where
    its documents begin and end, None for one document a row.

    Packed (conversations; with `eod`, documents that end with it): the rows lie behind each other, [1, b s].
    Of sequences that context-parallel ranks share, this rank's tokens; all of those ranks read the same samples.
    """
    where, batch = device.current_device(), dict(next(data_iterator))
    begins = batch.pop("document_begins", None) if eod is None else document_begins(batch["tokens"], eod)
    packed = None
    if begins is not None:
        packed = packed_seq_params_of(begins, where)
        batch = {name: batch[name].reshape(1, -1) for name in ("tokens", "labels", "loss_mask", "position_ids")}
    data = {name: value.to(where, non_blocking=True) for name, value in get_batch_on_this_cp_rank(batch, packed_seq_params=packed).items()}
    return data["tokens"], data["labels"], data["loss_mask"], data.get("attention_mask"), data["position_ids"], packed


def loss_func(
    loss_mask: torch.Tensor, losses: torch.Tensor, more: dict[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Losses per token [b, s] to (sum over the tokens that count, their number, what to log). A masked token contributes nothing.

    more: what else to log, by name [sum, tokens].
    The caller divides: by the tokens of the micro batch, or, with --calculate-per-token-loss, by those of the global batch.
    """
    mask = loss_mask.view(-1).float()
    # where, not a product: the loss of a masked token may be infinite, and 0 x inf is not 0
    total = torch.where(mask > 0, losses.view(-1).float() * mask, 0.0).sum()
    num_tokens = mask.sum()
    return total, num_tokens.to(torch.int), {"lm loss": torch.stack([total.detach(), num_tokens]), **(more or {})}


def reads_batches() -> bool:
    """Whether this rank's pipeline stages look at a batch: tokens go into the first one, labels into the last, masks and the ends of
    documents into all. The others read nothing, and never start a loader."""
    args, first = get_args(), parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    return first or parallel_state.is_pipeline_last_stage(ignore_virtual=True) or args.reset_attention_mask or args.sft


def forward_step(data_iterator: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, partial]:
    """One micro batch through the model: losses per token, and how to make a loss of them."""
    eod = get_tokenizer().eod if packs_documents(get_args()) else None
    tokens, labels, loss_mask, attention_mask, position_ids, packed = get_batch(data_iterator, eod) if reads_batches() else NO_BATCH
    losses = model(tokens, position_ids, attention_mask, labels=labels, packed_seq_params=packed, loss_mask=loss_mask)
    more = mtp_reports(unwrap_model(model)) if model.training else {}
    return losses, partial(loss_func, loss_mask, more=more)


if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
