"""GPT: embedding, a block of layers, output layer, loss. LLaMA and its kin are this model with other settings."""

from typing import Any

import torch
import torch.distributed as dist

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.init import deferred_initialization
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.param_sharding import build_param_table, initialize_parameters
from megatron.core.transformer.multi_latent_attention import rotary_embedding_of
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import get_pg_size

POSITION_EMBEDDINGS = ("learned_absolute", "rope", "none")
EMBEDDING_KEY = "embedding.word_embeddings.weight"


class GPTModel(LanguageModule):
    """One pipeline stage (one chunk of it) of a GPT.

    forward: ids, positions, labels [b, s] -> loss per token [b, s] fp32; without labels logits [b, s, vocabulary], this rank's
    columns of them when parallel_output.
    vocab_size is the padded one; config.logical_vocab_size says how many rows are tokens. Stages after the first return, and stages before
    the last take through `set_input_tensor`, hidden states [s, b, h]. Settings of rotary positions are the config's with latent attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: float | None = None,
        mtp_block_spec: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config, pg_collection)
        tp = get_pg_size(self.pg_collection.tp)
        _check_arguments(config, vocab_size, tp, position_embedding_type, fp16_lm_cross_entropy, mtp_block_spec, post_process)
        if config.multi_latent_attention and (rope_scaling or seq_len_interpolation_factor is not None):
            raise ValueError("rope_scaling and seq_len_interpolation_factor do not stretch latent attention; give config.rope_type yarn")
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.parallel_output = parallel_output
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.position_embedding_type = position_embedding_type
        # Tied weights that live in two stages: each copy's record names the other. Multi-token prediction embeds tokens in the last stage.
        apart = not (pre_process and post_process)
        tied_across_stages = share_embeddings_and_output_weights and apart
        embedding_key = EMBEDDING_KEY if tied_across_stages or (config.mtp_num_layers and apart) else None
        with deferred_initialization():
            if pre_process:
                self.embedding = LanguageModelEmbedding(
                    config,
                    vocab_size,
                    max_sequence_length,
                    position_embedding_type,
                    scatter_to_sequence_parallel=scatter_embedding_sequence_parallel,
                    pg_collection=self.pg_collection,
                    shared_with=embedding_key,
                )
            self.rotary_pos_emb: Any = self._build_rotary_embedding(
                rotary_percent=rotary_percent,
                seq_len_interpolation_factor=seq_len_interpolation_factor,
                rotary_base=rotary_base,
                rope_scaling=rope_scaling,
                rope_scaling_factor=rope_scaling_factor,
            )
            self.decoder = TransformerBlock(
                config,
                transformer_layer_spec,
                pre_process=pre_process,
                post_process=post_process,
                pg_collection=self.pg_collection,
                vp_stage=vp_stage,
            )
            self.mtp: MultiTokenPredictionBlock | None = None
            if post_process and mtp_block_spec is not None:
                self.mtp = MultiTokenPredictionBlock(config, mtp_block_spec, vp_stage, self.pg_collection)
            if post_process:
                self.output_layer = self._build_output_layer(tied_across_stages)
            if self.mtp is not None and not pre_process:
                self.embedding_copy = self._build_embedding_copy(scatter_embedding_sequence_parallel)
        build_param_table(self)
        if config.perform_initialization:
            initialize_parameters(self, config.init_seed)

    def _build_rotary_embedding(self, **settings: Any) -> RotaryEmbedding | None:
        """What turns queries and keys, if anything does; `settings`: arguments of RotaryEmbedding."""
        config, cp_group = self.config, self.pg_collection.cp
        if isinstance(config, MLATransformerConfig):  # whatever is added to the embedding, latent attention has positions of its own
            return rotary_embedding_of(config, cp_group)
        if self.position_embedding_type != "rope":
            return None
        assert config.kv_channels is not None
        settings |= {"rotary_interleaved": config.rotary_interleaved, "use_cpu_initialization": config.use_cpu_initialization}
        return RotaryEmbedding(config.kv_channels, cp_group=cp_group, **settings)

    def _build_output_layer(self, tied_across_stages: bool) -> ColumnParallelLinear:
        """The projection to the vocabulary; without a weight of its own where the embedding of this chunk lends it."""
        config, tied = self.config, self.share_embeddings_and_output_weights
        return ColumnParallelLinear(
            config.hidden_size,
            self.vocab_size,
            config=config,
            init_method=config.embedding_init_method if tied else config.init_method,  # type: ignore[arg-type]
            bias=False,
            gather_output=not self.parallel_output,
            skip_weight_param_allocation=tied and self.pre_process,
            pg_collection=self.pg_collection,
            logical_size=config.logical_vocab_size,
            shared_with=EMBEDDING_KEY if tied_across_stages else None,
        )

    def _build_embedding_copy(self, scatter: bool) -> LanguageModelEmbedding:
        """The last stage's own copy of the embedding; its table is the output layer's where these two are tied."""
        embedding = LanguageModelEmbedding(
            self.config,
            self.vocab_size,
            self.max_sequence_length,
            self.position_embedding_type,
            scatter_to_sequence_parallel=scatter,
            pg_collection=self.pg_collection,
            shared_with=EMBEDDING_KEY,
        )
        if self.share_embeddings_and_output_weights:
            embedding.word_embeddings.weight = self.output_layer.weight
        return embedding

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor]) -> None:
        """Hidden states from the stage before."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        decoder_input: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        extra_block_kwargs: dict[str, Any] | None = None,
        runtime_gather_output: bool | None = None,
        *,
        loss_mask: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """attention_mask: bool, True = hidden, [1 or b, 1, s, s], beside the causal mask; None for causal alone.

        With context parallelism s are this rank's tokens (core.utils.get_batch_on_this_cp_rank), of the mask's columns all.
        packed_seq_params: b is 1, and s are all tokens of its sequences, their padding included; it counts whole sequences.

        decoder_input [s, b, h] replaces the embedding. loss_mask is the caller's business: the loss comes back per token; experts' balance
        losses need its number of tokens for calculate_per_token_loss, and multi-token prediction, whose losses join the backward pass in
        training, needs it and the ids in the last stage too. padding_mask [b, s], True: padding, which no expert gets.
        """
        if decoder_input is None and self.pre_process:
            assert input_ids is not None
            decoder_input = self.embedding(input_ids, position_ids)
        angles = None
        if self.rotary_pos_emb is not None:
            angles = self.rotary_pos_emb(
                self.rotary_pos_emb.get_rotary_seq_len(inference_context, self.decoder, decoder_input, self.config, packed_seq_params),
                packed_seq=packed_seq_params is not None,
            )
        layer_arguments = {
            "attention_mask": attention_mask,
            "rotary_pos_emb": angles,
            "packed_seq_params": packed_seq_params,
            **self._moe_arguments(loss_mask, padding_mask),
            **(extra_block_kwargs or {}),
        }
        hidden = self.decoder(decoder_input, inference_context=inference_context, **layer_arguments)
        if not self.post_process:
            return hidden
        weight = self.shared_embedding_or_output_weight()
        if self.mtp is not None and labels is not None and self.training:
            hidden = self.mtp(
                hidden,
                input_ids=input_ids,
                position_ids=position_ids,
                labels=labels,
                loss_mask=loss_mask,
                embed=self.embedding if self.pre_process else self.embedding_copy,
                token_losses=lambda hidden, labels: self.compute_language_model_loss(labels, self.output_layer(hidden, weight=weight)[0]),
                **layer_arguments,
            )
        logits, _ = self.output_layer(hidden, weight=weight, runtime_gather_output=runtime_gather_output)
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(labels, logits)

    def _moe_arguments(self, loss_mask: torch.Tensor | None, padding_mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """What the layers' experts want to know of the micro batch, all context-parallel ranks together; every stage gets the masks."""
        if self.config.num_moe_experts is None:
            return {}
        arguments = {} if padding_mask is None else {"padding_mask": padding_mask}
        if self.config.calculate_per_token_loss and loss_mask is not None and self.training:
            tokens = loss_mask.detach().sum(dtype=torch.float32)  # a half-precision model gets its mask in half precision
            if get_pg_size(self.pg_collection.cp) > 1:
                dist.all_reduce(tokens, group=self.pg_collection.cp)
            arguments["loss_tokens"] = tokens
        return arguments


def _check_arguments(
    config: TransformerConfig, vocab_size: int, tp: int, position_embedding_type: str, fp16_loss: bool, mtp: Any, post_process: bool
) -> None:
    """Raises ValueError with every problem."""
    problems = []
    if position_embedding_type not in POSITION_EMBEDDINGS:
        problems.append(f"position_embedding_type {position_embedding_type!r} must be one of {', '.join(POSITION_EMBEDDINGS)}")
    if vocab_size % tp:
        problems.append(f"vocab_size {vocab_size} is not divisible by tensor parallel size {tp}; pad it to {-(-vocab_size // tp) * tp}")
    for name in ("logical_vocab_size", "softmax_vocab_size"):
        size = getattr(config, name)
        if size is not None and not 0 < size <= vocab_size:
            problems.append(f"config.{name} {size} must be between 1 and vocab_size {vocab_size}")
    if tp != config.tensor_model_parallel_size:
        problems.append(
            f"the tensor-parallel group has {tp} ranks but config.tensor_model_parallel_size is {config.tensor_model_parallel_size}"
        )
    if fp16_loss:
        problems.append("fp16_lm_cross_entropy is not built yet; leave it out: the loss in fp32 takes no more memory")
    if config.mtp_num_layers and mtp is None and post_process:
        problems.append(f"config.mtp_num_layers {config.mtp_num_layers} needs mtp_block_spec; get_gpt_mtp_block_spec makes it")
    if mtp is not None and not config.mtp_num_layers:
        problems.append("mtp_block_spec needs config.mtp_num_layers, which is not given; give both")
    if config.mtp_num_layers and position_embedding_type == "learned_absolute" and config.pipeline_model_parallel_size > 1:
        problems.append("learned positions are not in the last stage, where mtp_num_layers embeds tokens; use position_embedding_type rope")
    if problems:
        raise ValueError("; ".join(problems))
