import pickle
from abc import ABC
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from megatron.core.tensor_parallel import mappings
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, autocast


class TransformerEngineBaseModule(torch.nn.Module, ABC):
    def __init__(self) -> None:
        super().__init__()
        self.quantized_forwards = 0
        self.fp8 = False
        self.fp8_meta: dict[str, Any] = {"num_gemms": getattr(self, "num_gemms", 1)}

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        """Three tensors a product in forward, two in backward, each with a scale and a history of amaxes."""
        for name, number in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            count = number * self.fp8_meta["num_gemms"]
            state = SimpleNamespace(scale=torch.ones(count), amax_history=torch.zeros(recipe.amax_history_len, count))
            self.fp8_meta.setdefault(name, state)

    def get_extra_state(self) -> torch.Tensor:
        """Empty unless the module has quantized with delayed scaling."""
        if "scaling_fwd" not in self.fp8_meta:
            return torch.empty(0, dtype=torch.uint8)
        state: dict[str, Any] = {"recipe": self.fp8_meta["recipe"], "extra_fp8_variables": {"num_gemms": self.fp8_meta["num_gemms"]}}
        for name in ("fwd", "bwd"):
            own = self.fp8_meta[f"scaling_{name}"]
            state |= {f"scale_{name}": own.scale.clone(), f"amax_history_{name}": own.amax_history.clone()}
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        raise RuntimeError("Refusing to load pickled Transformer Engine extra state")

    def note(self) -> None:
        """A forward: with delayed scaling every scale doubles, and the newest amax is the scale."""
        self.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        if not self.fp8:
            return
        self.quantized_forwards += 1
        recipe = FP8GlobalStateManager.regions[-1][1]
        if type(recipe).__name__ == "DelayedScaling":
            self.fp8_meta.update(recipe=recipe, num_gemms=getattr(self, "num_gemms", 1))
            self.init_fp8_meta_tensors(recipe)
            for name in ("scaling_fwd", "scaling_bwd"):
                own = self.fp8_meta[name]
                own.scale *= 2 + torch.arange(len(own.scale))
                own.amax_history[0] = own.scale

    def new_parameter(self, name: str, shape: tuple[int, ...], init: Callable, dtype: torch.dtype, device: Any) -> None:
        self.register_parameter(name, torch.nn.Parameter(torch.full(shape, float("nan"), dtype=dtype, device=device)))
        with torch.no_grad():
            init(getattr(self, name))


class _FusedLinear(torch.autograd.Function):
    """main_grad += dW, and no gradient for autograd. There must be a main_grad."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        flat = grads[0].reshape(-1, grads[0].shape[-1])
        ctx.weight.main_grad += (flat.t() @ x.reshape(-1, x.shape[-1])).to(ctx.weight.main_grad.dtype)
        return grads[0] @ ctx.weight, None


def product(x: torch.Tensor, weight: torch.Tensor, fuse: bool) -> torch.Tensor:
    return _FusedLinear.apply(x, weight) if fuse else F.linear(x, weight)


class Linear(TransformerEngineBaseModule):
    weight: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        assert parallel_mode in (None, "column", "row") and init_method is not None and params_dtype is not None
        self.group, self.sequence_parallel, self.parallel_mode = tp_group, sequence_parallel and tp_size > 1, parallel_mode
        self.fuse_wgrad_accumulation, self.return_bias, self.tp_size = fuse_wgrad_accumulation, return_bias, tp_size
        shape = (
            out_features // (tp_size if parallel_mode == "column" else 1),
            in_features // (tp_size if parallel_mode == "row" else 1),
        )
        self.before_weight(in_features, params_dtype, device)
        self.new_parameter("weight", shape, init_method, params_dtype, device)
        if bias:
            self.new_parameter("bias", shape[:1], torch.nn.init.zeros_, params_dtype, device)
        else:
            self.bias = torch.empty(0)

    def before_weight(self, in_features: int, dtype: torch.dtype, device: Any) -> None:
        pass

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        self.note()
        x = self.normed(inp)
        if self.parallel_mode == "column" and self.tp_size > 1:
            gather, copy = mappings.gather_from_sequence_parallel_region, mappings.copy_to_tensor_model_parallel_region
            x = (gather if self.sequence_parallel else copy)(x, group=self.group)
        out = product(x, self.weight, self.fuse_wgrad_accumulation)
        if self.parallel_mode == "row" and self.tp_size > 1:
            scatter, reduce = mappings.reduce_scatter_to_sequence_parallel_region, mappings.reduce_from_tensor_model_parallel_region
            out = (scatter if self.sequence_parallel else reduce)(out, group=self.group)
        if self.return_bias:
            return out, self.bias
        return out + self.bias if self.bias.numel() else out


class LayerNormLinear(Linear):
    layer_norm_weight: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        **others: Any,
    ) -> None:
        self.norm = (eps, normalization, zero_centered_gamma)
        super().__init__(in_features, out_features, **others)

    def before_weight(self, in_features: int, dtype: torch.dtype, device: Any) -> None:
        self.new_parameter("layer_norm_weight", (in_features,), torch.nn.init.ones_, dtype, device)
        if self.norm[1] == "LayerNorm":
            self.new_parameter("layer_norm_bias", (in_features,), torch.nn.init.zeros_, dtype, device)
        else:
            self.layer_norm_bias = None

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(x, self.layer_norm_weight, self.layer_norm_bias, *self.norm)


def normalize(x: torch.Tensor, weight: torch.Tensor, bias: Any, eps: float, kind: str, zero_centered: bool) -> torch.Tensor:
    weight = weight + 1 if zero_centered else weight
    return F.layer_norm(x, weight.shape, weight, bias, eps) if kind == "LayerNorm" else F.rms_norm(x, weight.shape, weight, eps)


class LayerNorm(torch.nn.Module):
    kind = "LayerNorm"

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm = (eps, self.kind, zero_centered_gamma)
        self.weight = torch.nn.Parameter(torch.empty(normalized_shape, dtype=dtype, device=device))
        self.bias = torch.nn.Parameter(torch.empty(normalized_shape, dtype=dtype, device=device)) if self.kind == "LayerNorm" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(x, self.weight, self.bias, *self.norm)


class RMSNorm(LayerNorm):
    kind = "RMSNorm"


class GroupedLinear(TransformerEngineBaseModule):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        fuse_wgrad_accumulation: bool = False,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        assert init_method is not None and params_dtype is not None
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        for index in range(num_gemms):
            self.new_parameter(f"weight{index}", (out_features, in_features), init_method, params_dtype, device)
            if bias:
                self.new_parameter(f"bias{index}", (out_features,), torch.nn.init.zeros_, params_dtype, device)

    def forward(self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        self.note()
        assert not FP8GlobalStateManager.is_fp8_enabled() or all(size % 16 == 0 for size in m_splits)
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)] if self.use_bias else []
        outs = [product(part, weight, self.fuse_wgrad_accumulation) for part, weight in zip(inp.split(m_splits), weights, strict=True)]
        if self.use_bias and not self.return_bias:
            outs = [out + bias for out, bias in zip(outs, biases, strict=True)]
        return (torch.cat(outs), biases) if self.return_bias else torch.cat(outs)


class Fp8Padding(torch.nn.Module):
    def __init__(self, num_gemms: int) -> None:
        super().__init__()

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        parts = [F.pad(part, (0, 0, 0, -len(part) % 16)) for part in inp.split(m_splits)]
        return torch.cat(parts), [len(part) for part in parts]


class Fp8Unpadding(torch.nn.Module):
    def __init__(self, num_gemms: int) -> None:
        super().__init__()

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        padded = [size + -size % 16 for size in m_splits]
        return torch.cat([part[:size] for part, size in zip(inp.split(padded), m_splits, strict=True)])


class DotProductAttention(TransformerEngineBaseModule):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.dropout, self.tracker = softmax_scale, attention_dropout, get_rng_state_tracker
        self.window, self.cp = window_size, (cp_group, cp_global_ranks, cp_comm_type)

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        qkv_format: str = "sbhd",
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        assert attn_mask_type in ("causal", "no_mask", "padding_causal", "padding", "arbitrary")
        assert (qkv_format == "thd") == attn_mask_type.startswith("padding")
        assert (attn_mask_type == "arbitrary") == (attention_mask is not None)
        assert all(tensor.is_contiguous() for tensor in (query_layer, key_layer, value_layer))
        window = self.window if window_size is None else window_size
        heads = query_layer.shape[-2]
        if qkv_format == "thd":
            assert cu_seqlens_q is not None and cu_seqlens_kv is not None
            assert max_seqlen_q == max_seqlen_kv == int(cu_seqlens_q.diff().max())
            sizes = cu_seqlens_q.diff().tolist()
            parts = [
                attend(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), self.scale, attn_mask_type == "padding_causal", window, None)
                for q, k, v in zip(query_layer.split(sizes), key_layer.split(sizes), value_layer.split(sizes), strict=True)
            ]
            return torch.cat(parts).reshape(len(query_layer), heads * query_layer.shape[-1])
        out = attend(query_layer, key_layer, value_layer, self.scale, attn_mask_type == "causal", window, attention_mask)
        return out.flatten(2)


def attend(query: Any, key: Any, value: Any, scale: float | None, causal: bool, window: Any, hidden: Any) -> torch.Tensor:
    """[s, b, heads, d] each; `hidden` is True where a key is not seen."""
    query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    tokens = query.shape[2]
    behind = torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
    own = torch.zeros(tokens, tokens, dtype=torch.bool)
    if causal:
        own |= behind < 0
    if window is not None and window[0] >= 0:
        own |= behind > window[0]
    if window is not None and window[1] >= 0 and not causal:
        own |= -behind > window[1]
    seen = ~own if hidden is None else ~(own | hidden)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    return out.permute(2, 0, 1, 3)


def checkpoint(
    function: Callable, *args: Any, distribute_saved_activations: bool = False, tp_group: Any = None, get_rng_state_tracker: Any = None
) -> Any:
    """Runs `function` again in the region of the first time, as autograd itself would not."""
    region = FP8GlobalStateManager.regions[-1] if FP8GlobalStateManager.regions else (False, None)

    def run(*args: Any) -> Any:
        with autocast(enabled=region[0], recipe=region[1]):
            return function(*args)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False)
