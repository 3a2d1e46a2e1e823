"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019) over the last dimension, also with weights centred at zero.

Statistics are in fp32 at least, whatever the input's dtype; the output has the input's dtype.
"""

from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.fusions.fused_bias_dropout import bias_dropout_add
from megatron.core.fusions.kernels import kernels_run_on
from megatron.core.tensor_parallel.layers import empty_parameter
from megatron.core.tensor_parallel.param_sharding import declare, replicated

# What config.normalization may be -> whether it leaves out the mean and the bias.
NORMALIZATIONS = {"LayerNorm": False, "RMSNorm": True}
WIDEST_KERNEL = 16384  # the kernel holds a row at once
Added = tuple[torch.Tensor | None, torch.Tensor | None]  # a part's output [.., h] and its bias [h], where it has them
NOTHING_ADDED: Added = (None, None)


def is_rms(normalization: str) -> bool:
    """Whether a value of config.normalization is RMSNorm. Raises ValueError for an unknown one."""
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization {normalization!r} must be {' or '.join(map(repr, NORMALIZATIONS))}")
    return NORMALIZATIONS[normalization]


def norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, rms: bool, zero_centered: bool = False
) -> torch.Tensor:
    """Normalize the last dim, times weight (1 + weight when zero-centred), plus bias. LayerNorm, or RMSNorm when `rms`."""
    if kernels_run_on(x) and x.shape[-1] <= WIDEST_KERNEL:
        from megatron.core.fusions.kernels import norm as kernels

        return kernels.norm(x, weight, bias, eps, rms=rms, zero_centered=zero_centered)
    if zero_centered:
        weight = weight + 1
    if rms:
        # Where rms_norm is several operations, x gets a gradient from each: they are added up here, before the residual's joins them, so
        # that the order of the sums, and the last bit, is the same when the norm is run again in the backward pass.
        return F.rms_norm(x.view_as(x), weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def norm_plain(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, rms: bool, zero_centered: bool = False
) -> torch.Tensor:
    """The plain twin of `norm`."""
    wide = x if x.dtype is torch.float64 else x.float()
    if not rms:
        wide = wide - wide.mean(dim=-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    wide = wide * (weight + 1 if zero_centered else weight)
    return (wide if bias is None else wide + bias).to(x.dtype)


def norm_of_sum(
    x: torch.Tensor,
    added: Added,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    rms: bool,
    zero_centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the sum, the sum, which goes on as the residual) of x [.., h] and what a part of a layer gave; NOTHING_ADDED: it is x.

    Where kernels run one makes both, and in the backward pass one adds up both gradients, in fp32, where autograd would round once more.
    """
    kind: dict[str, Any] = {"rms": rms, "zero_centered": zero_centered}
    if kernels_run_on(x) and x.shape[-1] <= WIDEST_KERNEL and _like_rows_of(x, *added):
        from megatron.core.fusions.kernels import norm as kernels

        return kernels.norm_of_sum(x, added, weight, bias, eps, **kind)
    output, output_bias = added
    total = x if output is None else bias_dropout_add((output, output_bias), x, 0.0, False)
    return norm(total, weight, bias, eps, **kind), total


def _like_rows_of(x: torch.Tensor, output: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """Whether the sum has x's shape and dtype at each step."""
    if output is None:
        return True
    return (output.shape, output.dtype) == (x.shape, x.dtype) and (bias is None or (bias.shape, bias.dtype) == (x.shape[-1:], x.dtype))


class FusedLayerNorm(torch.nn.Module):
    """The norm that a config asks for: [.., hidden_size] -> same. With `added`: what norm_of_sum gives.

    `zero_centered_gamma` defaults to the config's. `normalization` may repeat what the config says: all norms of a model are of one kind,
    and ValueError is raised for another. `persist_layer_norm` changes nothing: torch chooses the kernel.
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = True,
        zero_centered_gamma: bool | None = None,
        normalization: str | None = None,
    ) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.rms = is_rms(config.normalization)
        if normalization is not None and is_rms(normalization) != self.rms:
            raise ValueError(f"normalization {normalization!r} contradicts config.normalization {config.normalization!r}; leave it out")
        self.zero_centered = config.layernorm_zero_centered_gamma if zero_centered_gamma is None else zero_centered_gamma
        self.hidden_size = (hidden_size,)
        # Each rank normalizes its own tokens under sequence parallelism: the weight's gradient is a partial sum.
        sharding = replicated((hidden_size,), grad_partial=("tp",) if config.sequence_parallel else ())
        self.weight = empty_parameter(sharding, config, 1)
        declare(self.weight, sharding, torch.nn.init.zeros_ if self.zero_centered else torch.nn.init.ones_)
        if self.rms:
            self.register_parameter("bias", None)
        else:
            self.bias = empty_parameter(sharding, config, 1)
            declare(self.bias, sharding, torch.nn.init.zeros_)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(0.0 if self.zero_centered else 1.0)
            if self.bias is not None:
                self.bias.zero_()

    def forward(self, input: torch.Tensor, added: Added | None = None) -> Any:
        kind: dict[str, Any] = {"rms": self.rms, "zero_centered": self.zero_centered}
        if added is not None:
            return norm_of_sum(input, added, self.weight, self.bias, self.eps, **kind)
        return norm(input, self.weight, self.bias, self.eps, **kind)

    def extra_repr(self) -> str:
        return f"{self.hidden_size[0]}, {'RMSNorm' if self.rms else 'LayerNorm'}, eps {self.eps}"
