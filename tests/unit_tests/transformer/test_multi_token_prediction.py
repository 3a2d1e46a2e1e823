"""Multi-token prediction against a plain re-implementation, its shift against a loop, its loss under masks and uneven ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megatron.core import parallel_state
from megatron.core.context_parallel.sequence_split import split_for_context_parallel, split_packed
from megatron.core.flops import model_flops
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.tensor_parallel.param_sharding import build_param_table, count_parameters
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.multi_token_prediction import mtp_reports, shifted
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import model_size
from megatron.training.arguments import core_transformer_config_from_args
from tests.distributed import run_on_ranks
from tests.unit_tests.training.lines import TINY, checked

S, B, VOCAB = 8, 2, 16
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "params_dtype": torch.float64,
    "init_method_std": 0.3,
    "mtp_num_layers": 2,
    "mtp_loss_scaling_factor": 0.4,
}


def gpt(**extra: Any) -> GPTModel:
    config = TransformerConfig(**{**SIZES, **extra})
    block = get_gpt_decoder_block_spec(config, False)
    spec = get_gpt_mtp_block_spec(config, block, False)
    return GPTModel(config, block, VOCAB, S, position_embedding_type="rope", mtp_block_spec=spec)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, labels [b, s], and a mask of some of them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (B, S + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:], (torch.rand(B, S, generator=generator) < 0.6).double()


def plain_losses(model: Any, ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """By depth the mean loss, position by position of DeepSeek-V3's equations 21 to 25."""
    seen: list[torch.Tensor] = []
    hook = model.decoder.register_forward_hook(lambda _, __, out: seen.append(out))
    was_training = model.training
    model.eval()(ids, None, None)
    hook.remove()
    model.train(was_training)
    hidden, found = seen[0], []
    assert model.mtp is not None
    for depth, layer in enumerate(model.mtp.layers, 1):
        length = S - depth  # the last positions have no token that far ahead
        embedded = model.embedding.word_embeddings.weight[ids[:, depth:]].transpose(0, 1)
        joined = torch.cat([layer.enorm(embedded), layer.hnorm(hidden[:length])], dim=-1) @ layer.eh_proj.weight.T
        output, _ = layer.transformer_layer(joined, rotary_pos_emb=model.rotary_pos_emb(length))
        hidden = layer.final_layernorm(output)
        logits = (hidden @ model.output_layer.weight.T).transpose(0, 1)
        losses = F.cross_entropy(logits.flatten(0, 1), labels[:, depth:].flatten(), reduction="none").view(B, length)
        found.append((losses * mask[:, depth:]).sum() / mask[:, depth:].sum())
    return found


def trained(model: GPTModel, ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of a step of one micro batch."""

    def step(iterator: Any, model: GPTModel) -> tuple[torch.Tensor, Any]:
        losses = model(ids, None, None, labels=labels, loss_mask=mask)
        return losses, lambda losses: ((losses * mask).sum(), mask.sum(), {})

    forward_backward_no_pipelining(forward_step_func=step, data_iterator=iter(()), model=model, num_microbatches=1)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return grads


@pytest.mark.parametrize("extra", [{}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}])
def test_equals_the_equations(extra: dict[str, Any]) -> None:
    model = gpt(**extra)
    ids, labels, mask = batch()
    grads = trained(model, ids, labels, mask)
    depths = plain_losses(model, ids, labels, mask)
    reports = mtp_reports(model)
    assert list(reports) == ["mtp_1 loss", "mtp_2 loss"]
    for report, expected in zip(reports.values(), depths):
        assert (report[0] / report[1]).item() == pytest.approx(expected.item(), rel=1e-11)
    main = model.eval()(ids, None, None, labels=labels)
    total = (main * mask).sum() / mask.sum() + 0.4 / 2 * (depths[0] + depths[1])
    wanted = list(torch.autograd.grad(total, list(model.parameters())))
    torch.testing.assert_close(grads, wanted, rtol=1e-9, atol=1e-12)


def test_evaluation_and_generation_have_none_of_it() -> None:
    model = gpt()
    ids, labels, mask = batch()
    assert model.mtp is not None
    model.eval()(ids, None, None, labels=labels, loss_mask=mask)
    model.train()(ids, None, None)
    assert model.mtp.losses == [] and mtp_reports(gpt_without()) == {}


def gpt_without() -> GPTModel:
    config = TransformerConfig(**{**SIZES, "mtp_num_layers": None})
    return GPTModel(config, get_gpt_decoder_block_spec(config, False), VOCAB, S, position_embedding_type="rope")


def test_labels_that_do_not_count_change_nothing() -> None:
    """The extra losses once went over padding and prompts: the mask did not reach them."""
    model = gpt()
    ids, labels, mask = batch()
    mask[:, S // 2 :] = 0.0
    before, losses = trained(model, ids, labels, mask), [pair.clone() for pair in mtp_reports(model).values()]
    labels[:, S // 2 :] = (labels[:, S // 2 :] + 5) % VOCAB
    assert all(map(torch.equal, before, trained(model, ids, labels, mask)))
    assert all(map(torch.equal, losses, mtp_reports(model).values()))
    assert [pair[1].item() for pair in losses] == [mask[:, depth:].sum().item() for depth in (1, 2)]


def test_tokens_weigh_alike_wherever_they_lie() -> None:
    """With the loss by tokens each rank's part was divided by that rank's own tokens: ranks with few of them counted too much. Here micro
    batches of many and of few tokens give the gradients of all of them in one (ranks: `dp4 per-token ahead` of the layouts' table)."""
    model = gpt(calculate_per_token_loss=True)
    ids, labels, mask = batch()
    mask[0], mask[1, 2:] = 1.0, 0.0

    def gradients(parts: list[slice]) -> list[torch.Tensor]:
        rows = iter(parts)

        def step(iterator: Any, model: GPTModel) -> tuple[torch.Tensor, Any]:
            one = next(rows)
            losses = model(ids[one], None, None, labels=labels[one], loss_mask=mask[one])
            return losses, lambda losses: ((losses * mask[one]).sum(), mask[one].sum(), {})

        forward_backward_no_pipelining(forward_step_func=step, data_iterator=iter(()), model=model, num_microbatches=len(parts))
        found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return found

    together = gradients([slice(0, 2)])
    torch.testing.assert_close(gradients([slice(0, 1), slice(1, 2)]), together, rtol=1e-10, atol=1e-12)
    depths = plain_losses(model, ids, labels, mask)
    sums = [mean * mask[:, depth:].sum() for depth, mean in enumerate(depths, 1)]
    main = (model.eval()(ids, None, None, labels=labels) * mask).sum()
    wanted = list(torch.autograd.grad(main + 0.4 / 2 * (sums[0] + sums[1]), list(model.parameters())))
    torch.testing.assert_close(together, wanted, rtol=1e-9, atol=1e-11)


# --- the shift ---


@pytest.mark.parametrize(("lengths", "padded"), [([1, 3, 4], [4, 4, 4]), ([8], [8]), ([5, 2, 1], [8, 4, 4])])
@pytest.mark.parametrize("ranks", [1, 2])
def test_sequences_are_shifted_by_themselves(lengths: list[int], padded: list[int], ranks: int) -> None:
    """Once boundaries without padding were used under context parallelism, and tokens leaked between sequences."""
    total = sum(padded)
    tokens = torch.arange(1, total + 1).view(1, -1)
    expected, start = torch.zeros_like(tokens), 0
    for length, room in zip(lengths, padded):
        expected[0, start : start + length - 1] = tokens[0, start + 1 : start + length]
        start += room
    counts = [torch.tensor([0, *torch.tensor(numbers).cumsum(0).tolist()], dtype=torch.int32) for numbers in (lengths, padded)]
    params = PackedSeqParams("thd", counts[0], counts[0], counts[1], counts[1])
    if ranks == 1:
        assert torch.equal(shifted([tokens], params)[0], expected)
        return
    for rank, found in enumerate(run_on_ranks(2, _shift, tokens, params)):
        assert torch.equal(found, split_packed(expected, 1, params, rank, 2))


def _shift(tokens: torch.Tensor, params: PackedSeqParams | None) -> torch.Tensor:
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    rank, group = dist.get_rank(), parallel_state.get_context_parallel_group()
    own = split_for_context_parallel(tokens, 1, rank, 2) if params is None else split_packed(tokens, 1, params, rank, 2)
    return shifted([own], params, group)[0]


def test_rows_are_shifted_over_the_borders_of_ranks() -> None:
    tokens = torch.randn(3, 8)
    expected = torch.cat([tokens[:, 1:], torch.zeros(3, 1)], dim=1)
    assert torch.equal(shifted([tokens])[0], expected)
    for rank, found in enumerate(run_on_ranks(2, _shift, tokens, None)):
        assert torch.equal(found, split_for_context_parallel(expected, 1, rank, 2))


# --- the model around it ---


def test_checkpoint_keys_and_the_place_of_layers() -> None:
    model: Any = gpt(num_moe_experts=2, moe_layer_freq=[0, 1])
    table = build_param_table(model)
    keys = {name: record.key for name, record in table.items() if name.startswith("mtp.layers.1.")}
    assert keys["mtp.layers.1.eh_proj.weight"] == "mtp.layers.1.eh_proj.weight"
    norm = "mtp.layers.1.transformer_layer.self_attention.linear_qkv.layer_norm_weight"
    assert keys["mtp.layers.1.transformer_layer.input_layernorm.weight"] == norm
    assert keys["mtp.layers.1.transformer_layer.pre_mlp_layernorm.weight"] == "mtp.layers.1.transformer_layer.pre_mlp_layernorm.weight"
    experts = {key for key in keys.values() if "experts" in key}
    assert "mtp.layers.1.transformer_layer.mlp.experts.experts.linear_fc1.weight" in experts
    assert {record.layer for record in table.values()} == {None, 0, 1}
    assert [layer.transformer_layer.mlp.router.layer_number for layer in model.mtp.layers] == [3, 4]
    assert {"mtp.layers.0.enorm.weight", "mtp.layers.0.hnorm.weight", "mtp.layers.0.final_layernorm.weight"} <= table.keys()


def test_what_does_not_go_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    two = "--pipeline-model-parallel-size 2"
    config = TransformerConfig(**SIZES)
    block = get_gpt_decoder_block_spec(config, False)
    with pytest.raises(ValueError, match="mtp_num_layers 2 needs mtp_block_spec"):
        GPTModel(config, block, VOCAB, S)
    without = TransformerConfig(**{**SIZES, "mtp_num_layers": None})
    assert get_gpt_mtp_block_spec(without, block, False) is None
    spec = get_gpt_mtp_block_spec(config, block, False)
    with pytest.raises(ValueError, match=r"mtp_block_spec needs config\.mtp_num_layers"):
        GPTModel(without, block, VOCAB, S, mtp_block_spec=spec)
    with pytest.raises(ValueError, match=r"has 2 layers, but config\.mtp_num_layers is 1"):
        GPTModel(TransformerConfig(**{**SIZES, "mtp_num_layers": 1}), block, VOCAB, S, mtp_block_spec=spec)
    with pytest.raises(ValueError, match="mtp_num_layers 0 must be at least 1"):
        TransformerConfig(**{**SIZES, "mtp_num_layers": 0})
    for line, words in (
        (
            f"{two} --position-embedding-type rope --mtp-num-layers 1 --pipeline-model-parallel-layout Etm|tttL",
            "must stand in the last stage, before L",
        ),
        (
            f"{two} --position-embedding-type rope --mtp-num-layers 2 --pipeline-model-parallel-layout Ett|ttmL",
            "has 1 layers for multi-token prediction, m: the model has 2",
        ),
        ("--mtp-num-layers 1 --window-size 4,0 --window-attn-skip-freq [1,1,0,1]", "--mtp-num-layers"),
        (f"{two} --mtp-num-layers 1", "which has no learned positions"),
        ("--mtp-use-repeated-layer", "does not support yet"),
    ):
        with pytest.raises(ValueError, match=words):
            checked([*TINY, *line.split()])
    (note,) = checked([*TINY, "--mtp-loss-scaling-factor", "0.3"]).notes
    assert note == "--mtp-loss-scaling-factor 0.3 has no effect without --mtp-num-layers"


@pytest.mark.parametrize("more", ["", "--num-experts 4 --moe-ffn-hidden-size 48 --moe-layer-freq ([0]*1+[1]*3) --swiglu"])
def test_check_config_and_flops_count_it(more: str) -> None:
    args = checked([*TINY, "--mtp-num-layers", "2", "--attention-dropout", "0", "--hidden-dropout", "0", *more.split()])
    config = core_transformer_config_from_args(args)
    config.attention_backend = AttnBackend.unfused
    block = get_gpt_decoder_block_spec(config, False)
    spec = get_gpt_mtp_block_spec(config, block, False)
    model = GPTModel(config, block, 128, 32, share_embeddings_and_output_weights=True, mtp_block_spec=spec)
    counted = sum(model_size.parameters_of_layers(args)) + (model_size.embedding_parameters(args) or 0)
    assert counted == count_parameters(model) == sum(param.numel() for param in model.parameters())
    ids = torch.randint(0, 128, (1, 32))
    with FlopCounterMode(display=False) as counter:
        model(ids, ids % 32, None, labels=ids).sum().backward()
    flops = model_flops(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_attention_heads,
        kv_channels=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
        seq_length=32,
        vocab_size=128,
        causal=False,
        gated_linear_unit=args.swiglu,
        num_experts=args.num_experts,
        moe_layers=sum(config.moe_layers()),
        moe_ffn_hidden_size=args.moe_ffn_hidden_size or 0,
        moe_router_topk=args.moe_router_topk,
        mtp_num_layers=2,
        mtp_layers_are_moe=bool(config.moe_layers()[-1]),
    )
    assert counter.get_total_flops() == pytest.approx(flops, rel=1e-6)
