"""Transformer Engine's layers, by a stand-in that computes in plain torch: the same model, gradients and names as the local backend's."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core import dist_checkpointing, optional_imports, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions import transformer_engine as te
from megatron.core.extensions.transformer_engine import attention, base
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import packed_seq_params_of
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.param_sharding import build_param_table
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.extra_state import extra_state_objects, restore_extra_states
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.distributed import ranks
from tests.fake_te import fake_transformer_engine

VOCAB, SEQ = 48, 12
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "num_query_groups": 2,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
}
MOE: dict[str, Any] = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 0.01}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA,
    "zero_centered": {"layernorm_zero_centered_gamma": True, "qk_layernorm": True, "kv_channels": 12, "window_size": (4, 0)},
    "experts": MOE,
    "grouped experts": {**LLAMA, **MOE, "moe_grouped_gemm": True, "moe_shared_expert_intermediate_size": 16},
    "grouped experts with biases": {**MOE, "moe_grouped_gemm": True, "moe_layer_freq": [0, 1]},
}


@pytest.fixture(autouse=True)
def pytorch() -> Iterator[Any]:
    with fake_transformer_engine() as module:
        yield module


def config_of(kind: str, **extra: Any) -> TransformerConfig:
    settings: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.float64, **MODELS[kind], **extra}
    return TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=32, **settings)


def model(config: TransformerConfig, use_te: bool) -> GPTModel:
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=use_te)
    return GPTModel(config, spec, VOCAB, SEQ, position_embedding_type="rope")


def layers_of(chunk: GPTModel) -> Any:
    return chunk.decoder.layers


def by_key(chunk: torch.nn.Module, values: Any) -> dict[tuple[str, int | None, int], torch.Tensor]:
    """(checkpoint key, layer, expert) -> values(parameter), of one expert each."""
    found = {}
    for record in build_param_table(chunk).values():
        experts, value = record.sharding.experts, values(record.param)
        if experts is None or experts.count is None:
            found[record.key, record.layer, experts.first if experts else 0] = value
        else:
            found.update({(record.key, record.layer, expert): part for expert, part in zip(experts.held, value, strict=True)})
    return found


def train(chunk: GPTModel, steps: int = 2, micro_batches: int = 2, **ddp: Any) -> tuple[list[float], dict]:
    """Losses, and the last step's main gradients: the weights move by a tenth of them in between."""
    wrapped = DistributedDataParallel(chunk.config, DistributedDataParallelConfig(**ddp), chunk)
    draw = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        wrapped.zero_grad_buffer()
        for number in range(micro_batches):
            ids = torch.randint(0, VOCAB, (2, SEQ + 1), generator=draw)
            positions = torch.arange(SEQ).expand(2, -1)
            if number < micro_batches - 1:
                with wrapped.no_sync():
                    loss = wrapped(ids[:, :-1], positions, None, labels=ids[:, 1:]).mean()
                    loss.backward()
            else:
                loss = wrapped(ids[:, :-1], positions, None, labels=ids[:, 1:]).mean()
                loss.backward()
            losses.append(loss.item())
        wrapped.finish_grad_sync()
        with torch.no_grad():
            for param in chunk.parameters():
                param.sub_(0.1 * param.main_grad)  # type: ignore[attr-defined]
    return losses, by_key(chunk, lambda param: param.main_grad.clone())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("fusion", [True, False])
def test_it_is_the_same_model(kind: str, fusion: bool) -> None:
    config = config_of(kind, gradient_accumulation_fusion=fusion)
    local, other = model(config, False), model(config, True)
    assert isinstance(layers_of(other)[0].self_attention.linear_qkv, te.TELayerNormColumnParallelLinear)
    initial = [by_key(chunk, lambda param: param.detach().clone()) for chunk in (local, other)]
    assert initial[0].keys() == initial[1].keys() and all(torch.equal(value, initial[1][key]) for key, value in initial[0].items())
    assert layers_of(other)[0].self_attention.linear_proj.weight.adds_to_main_grad == fusion
    (losses, grads), (te_losses, te_grads) = train(local), train(other)
    assert te_losses == pytest.approx(losses, rel=1e-12) and losses[0] != losses[-1]
    for key, value in grads.items():
        torch.testing.assert_close(te_grads[key], value, rtol=1e-9, atol=1e-12, msg=str(key))


def test_registration_is_in_the_order_of_megatron_files() -> None:
    first = [name.removeprefix("decoder.layers.0.") for name, _ in model(config_of("gpt"), True).decoder.layers[0].named_parameters()]
    expected = ["linear_proj.weight", "linear_proj.bias", "linear_qkv.layer_norm_weight", "linear_qkv.layer_norm_bias"]
    assert [name.removeprefix("self_attention.") for name in first[:6]] == [*expected, "linear_qkv.weight", "linear_qkv.bias"]


def test_a_checkpoint_needs_no_map_of_names() -> None:
    config = config_of("grouped experts")
    shards = [model(config, use_te).sharded_state_dict() for use_te in (False, True)]
    ours, theirs = ({item.key: item.global_shape for item in state.values() if hasattr(item, "global_shape")} for state in shards)
    assert ours == {key: shape for key, shape in theirs.items() if not key.endswith("_extra_state")}
    assert theirs["decoder.layers.mlp.experts.experts.linear_fc2.weight"] == (2, 4, 32, 32)


def _on_two_ranks(use_te: bool, kind: str, settings: dict, ddp: dict) -> Any:
    with fake_transformer_engine():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=settings.get("tensor_model_parallel_size", 1))
        try:
            return train(model(config_of(kind, **settings), use_te), **ddp)
        finally:
            parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    ("kind", "settings", "ddp"),
    [
        ("gpt", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
        ("zero_centered", {"tensor_model_parallel_size": 2}, {}),
        ("experts", {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 2}, {}),
        ("grouped experts with biases", {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 2}, {}),
        ("llama", {}, {"overlap_grad_reduce": True, "bucket_size": 500}),
        ("llama", {}, {"overlap_grad_reduce": True, "bucket_size": 500, "use_distributed_optimizer": True}),
    ],
)
def test_two_ranks_do_what_they_do_with_the_local_backend(kind: str, settings: dict, ddp: dict) -> None:
    local, other = (ranks().run(2, _on_two_ranks, use_te, kind, settings, ddp) for use_te in (False, True))
    for (losses, grads), (te_losses, te_grads) in zip(local, other, strict=True):
        assert te_losses == pytest.approx(losses, rel=1e-12)
        for key, value in grads.items():
            torch.testing.assert_close(te_grads[key], value, rtol=1e-9, atol=1e-12, msg=str(key))


def attentions(config: TransformerConfig, kind: AttnMaskType = AttnMaskType.causal) -> tuple[Any, Any]:
    return tuple(cls(config, 1, kind, "self") for cls in (DotProductAttention, te.TEDotProductAttention))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [AttnMaskType.causal, AttnMaskType.no_mask, AttnMaskType.padding])
@pytest.mark.parametrize("masked", ["", "mask", "window", "packed"])
def test_attention_sees_what_the_local_one_sees(kind: AttnMaskType, masked: str) -> None:
    config = config_of("llama", **({"window_size": (3, 2)} if masked == "window" else {}))
    shape = (SEQ, 1 if masked == "packed" else 2)
    query = torch.randn(*shape, 4, 8, dtype=torch.float64).transpose(0, 0)
    key, value = torch.randn(2, *shape, 2, 8, dtype=torch.float64)
    mask = torch.rand(2, 1, SEQ, SEQ) < 0.3 if masked == "mask" else None
    if mask is not None:
        mask[..., 0] = False  # every query sees something
    begins = torch.zeros(1, SEQ, dtype=torch.bool)
    begins[0, 5] = True
    packed = packed_seq_params_of(begins, "cpu") if masked == "packed" else None
    plain, theirs = (core(query, key, value, mask, packed_seq_params=packed) for core in attentions(config, kind))
    assert plain.shape == theirs.shape
    torch.testing.assert_close(plain, theirs)


def test_what_attention_cannot_do_is_refused() -> None:
    _, core = attentions(config_of("gpt"))
    with pytest.raises(ValueError, match="attention_bias is not built yet"):
        core(*torch.randn(3, SEQ, 2, 4, 8), None, attention_bias=torch.zeros(1))
    core.context_size = 2
    with pytest.raises(ValueError, match="an attention mask: transformer_engine has none over several"):
        core(*torch.randn(3, SEQ, 2, 4, 8), torch.zeros(1, 1, SEQ, SEQ, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"window_size \(4, -1\): without a causal mask"):
        attentions(config_of("gpt", window_size=(4, -1)), AttnMaskType.no_mask)
    with pytest.raises(ValueError, match="attention_backend local: transformer_impl transformer_engine has auto, flash, fused and unfused"):
        te.TEDotProductAttention(config_of("gpt", attention_backend=AttnBackend.local), 1, AttnMaskType.causal)


def test_the_kernel_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("FLASH", "FUSED", "UNFUSED"):
        monkeypatch.setenv(f"NVTE_{kind}_ATTN", "1")
    attention.choose_kernel(AttnBackend.fused)
    assert [attention.os.environ[f"NVTE_{kind}_ATTN"] for kind in ("FLASH", "FUSED", "UNFUSED")] == ["0", "1", "0"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp_comm_overlap": True, "tensor_model_parallel_size": 2, "sequence_parallel": True}, "tp_comm_overlap True: is not built for"),
        ({"apply_query_key_layer_scaling": True}, "apply_query_key_layer_scaling True"),
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm True"),
        ({"context_parallel_size": 2, "window_size": (4, 0)}, "has no sliding window in a ring; 'all_gather' works"),
        ({"cuda_graph_impl": "local"}, "excludes transformer_impl transformer_engine"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(settings: dict, words: str) -> None:
    config_of("gpt", **settings)
    with pytest.raises(ValueError, match=words):
        config_of("gpt", transformer_impl="transformer_engine", **settings)


def test_without_the_package_a_layer_says_so_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    base.te_pytorch.cache_clear()
    base._joined.cache_clear()
    monkeypatch.setattr(base, "require", optional_imports.require)
    monkeypatch.setattr(optional_imports, "available", lambda name: False)
    spec = get_gpt_layer_with_transformer_engine_spec()
    config = config_of("gpt")
    with pytest.raises(ValueError, match=r"needs the package transformer_engine, which is not installed: pip install 'transformer_engine"):
        GPTModel(config, spec, VOCAB, SEQ)


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    base.te_pytorch.cache_clear()
    monkeypatch.setattr(base, "OLDEST", "2.5")
    with pytest.raises(ValueError, match=r"needs Transformer Engine 2.5 or newer"):
        base.te_pytorch("TENorm")


def test_classes_are_derived_from_and_copied_as_usual(pytorch: Any) -> None:
    class Mine(te.TERowParallelLinear):
        def forward(self, input_: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
            return super().forward(2 * input_)

    config = config_of("gpt")
    made = Mine(4, 6, config=config, init_method=torch.nn.init.ones_, bias=True, input_is_parallel=True, skip_bias_add=True)
    assert isinstance(made, te.TELinear) and isinstance(made, pytorch.Linear) and type(made).__name__ == "Mine"
    for linear in (made, copy.deepcopy(made)):
        output, bias = linear(torch.ones(3, 4, dtype=torch.float64))
        assert torch.equal(output, torch.full((3, 6), 8.0, dtype=torch.float64)) and bias is linear.bias
    assert isinstance(te.TENorm(config, 8), pytorch.LayerNorm) and isinstance(te.TENorm(config_of("llama"), 8), pytorch.RMSNorm)
    with pytest.raises(ValueError, match=r"'RMSNorm' contradicts config\.normalization 'LayerNorm'"):
        te.TENorm(config, 8, normalization="RMSNorm")


def fp8_config(kind: str = "llama", **extra: Any) -> TransformerConfig:
    config = config_of(kind, transformer_impl="transformer_engine")
    for name, value in {"fp8": "hybrid", "fp8_recipe": "delayed", **extra}.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("delayed", "DelayedScaling"),
        ("tensorwise", "Float8CurrentScaling"),
        ("blockwise", "Float8BlockScaling"),
        ("mxfp8", "MXFP8BlockScaling"),
    ],
)
def test_layers_quantize_by_the_recipe_and_the_first_and_last_do_not(recipe: str, name: str, pytorch: Any) -> None:
    config = fp8_config(fp8_recipe=recipe, first_last_layers_bf16=True, num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=1)
    chunk = model(config, True)
    state = pytorch.fp8.FP8GlobalStateManager
    state.entered.clear()
    train(chunk, steps=1, micro_batches=1)
    counts = [layer.mlp.linear_fc1.quantized_forwards for layer in layers_of(chunk)]
    assert counts == [1, 0] and not state.regions
    assert {type(used).__name__ for enabled, used in state.entered if enabled} == {name}
    # delayed: one region around all layers, and within it one that is off; else one for the layer
    assert [enabled for enabled, _ in state.entered] == ([True, False] if recipe == "delayed" else [True])


def test_fp8_settings_reach_the_recipe() -> None:
    settings: dict[str, Any] = {"fp8": "e4m3", "fp8_margin": 2, "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"}
    recipe = te.precision.fp8_recipe(fp8_config(**settings))
    assert (recipe.fp8_format.name, recipe.margin, recipe.amax_history_len, recipe.amax_compute_algo) == ("E4M3", 2, 16, "max")
    default = te.precision.fp8_recipe(fp8_config())
    assert (default.fp8_format.name, default.margin, default.amax_history_len, default.amax_compute_algo) == ("HYBRID", 0, 1, "most_recent")


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_full_recompute_quantizes_again(recipe: str) -> None:
    plain, again = fp8_config(fp8_recipe=recipe), fp8_config(fp8_recipe=recipe)
    again.recompute_granularity, again.recompute_method, again.recompute_num_layers = "full", "uniform", 1
    chunks = [model(config, True) for config in (plain, again)]
    results = [train(chunk, steps=1, micro_batches=1) for chunk in chunks]
    assert results[0][0] == results[1][0]
    assert [layers_of(chunk)[0].mlp.linear_fc2.quantized_forwards for chunk in chunks] == [1, 2]


def test_experts_rows_are_padded_to_what_fp8_takes() -> None:
    config = config_of("grouped experts with biases")
    config.fp8, config.fp8_recipe = "hybrid", "tensorwise"  # type: ignore[attr-defined]
    plain = train(model(config_of("grouped experts with biases"), True), steps=1)
    assert train(model(config, True), steps=1)[0] == pytest.approx(plain[0], rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fp8_recipe": "custom"}, "fp8_recipe 'custom'"),
        ({"fp8": "e5m2"}, "fp8 'e5m2': must be e4m3 or hybrid"),
        ({"num_moe_experts": 4}, "needs moe_grouped_gemm"),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, "mlp excludes fp8"),
    ],
)
def test_what_fp8_excludes(settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        base.refuse_unsupported(fp8_config(**settings))


def test_groups_of_a_context_reach_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without processes: what would be given to Transformer Engine."""
    monkeypatch.setattr(attention, "get_pg_size", lambda group: 2 if group is not None else 1)
    monkeypatch.setattr(attention.dist, "get_process_group_ranks", lambda group: [0, 1])
    groups: Any = ProcessGroupCollection(cp="ring", hcp=["exchange", "ring"])
    config = config_of("gpt", context_parallel_size=2)
    assert attention._context_parallel(config, groups, "p2p")["cp_group"] == "ring"
    given = attention._context_parallel(config, groups, "a2a+p2p")
    assert given["cp_group"] == ["exchange", "ring"] and given["cp_global_ranks"] == [0, 1] and given["cp_comm_type"] == "a2a+p2p"


def scales_of(chunk: GPTModel, expert: int = 0) -> list[torch.Tensor]:
    """Of the first layer's fc2: of one expert where it has several."""
    mlp = layers_of(chunk)[0].mlp
    linear = mlp.experts.linear_fc2 if hasattr(mlp, "experts") else mlp.linear_fc2
    forward, backward = linear.fp8_meta["scaling_fwd"], linear.fp8_meta["scaling_bwd"]
    return [forward.scale[3 * expert :][:3], forward.amax_history[:, 3 * expert :][:, :3], backward.scale[2 * expert :][:2]]


@pytest.mark.parametrize("kind", ["llama", "grouped experts"])
def test_scales_of_delayed_scaling_are_stored_by_key_layer_and_expert(kind: str, tmp_path: Path) -> None:
    """FP8-01, and CKPT-24: written as Megatron-LM does, restored without running a pickle's code."""
    chunk, fresh = (model(fp8_config(kind=kind), True) for _ in range(2))
    train(chunk, steps=1)
    objects = extra_state_objects(chunk)
    keys = {item.unique_key for item in objects.values()}
    if kind == "llama":
        assert {f"decoder.layers.self_attention.core_attention._extra_state/shard_{layer}_2" for layer in range(2)} <= keys
        assert {f"decoder.layers.mlp.linear_fc2._extra_state/shard_{layer}_2" for layer in range(2)} <= keys
    else:
        places = [f"{layer}.{expert}_2.4" for layer in range(2) for expert in range(4)]
        assert {f"decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_{place}" for place in places} <= keys
    dist_checkpointing.save({"model": objects}, tmp_path)
    wanted = {name: item.without_data() for name, item in extra_state_objects(fresh).items()}
    loaded = dist_checkpointing.load({"model": wanted}, tmp_path)["model"]
    assert restore_extra_states(fresh, loaded) == (8 if kind == "llama" else 12)
    for expert in range(4 if kind == "grouped experts" else 1):
        for stored, restored in zip(scales_of(chunk, expert), scales_of(fresh, expert), strict=True):
            assert torch.equal(stored, restored) and stored.max() > 1


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_no_state_is_invented_for_what_has_none(recipe: str | None) -> None:
    chunk = model(fp8_config(kind="grouped experts", fp8=recipe and "hybrid", fp8_recipe=recipe), True)
    train(chunk, steps=1)
    objects = extra_state_objects(chunk)
    assert len(objects) > 10 and all(item.data.numel() == 0 for item in objects.values())
    assert restore_extra_states(chunk, {name: item.data for name, item in objects.items()}) == 0


def test_scales_that_are_missing_or_do_not_fit_start_anew() -> None:
    chunk = model(fp8_config(fp8_amax_history_len=4), True)
    train(chunk, steps=1)
    stored = {name: item.data for name, item in extra_state_objects(chunk).items()}
    longer = model(fp8_config(fp8_amax_history_len=8), True)
    assert restore_extra_states(longer, stored) == 8
    assert torch.equal(scales_of(longer)[1][:4], scales_of(chunk)[1]) and not scales_of(longer)[1][4:].any()
    assert restore_extra_states(model(fp8_config(), True), {}) == 0
    assert restore_extra_states(model(fp8_config(fp8_recipe="tensorwise"), True), stored) == 0


def test_a_state_dict_with_scales_is_loaded_without_running_its_pickle() -> None:
    chunk, fresh = model(fp8_config(), True), model(fp8_config(), True)
    train(chunk, steps=1)
    fresh.load_state_dict(chunk.state_dict())
    assert all(torch.equal(one, other) for one, other in zip(scales_of(chunk), scales_of(fresh), strict=True))
