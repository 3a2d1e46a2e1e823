"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019) over the last dimension, also with weights centred at zero.

Statistics are in fp32 at least, whatever the input's dtype; the output has the input's dtype.
"""

from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.fusions.kernels import kernels_run_on
from megatron.core.tensor_parallel.layers import empty_parameter
from megatron.core.tensor_parallel.param_sharding import declare, replicated

# What config.normalization may be -> whether it leaves out the mean and the bias.
NORMALIZATIONS = {"LayerNorm": False, "RMSNorm": True}
WIDEST_KERNEL = 16384  # the kernel holds a row at once


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


class FusedLayerNorm(torch.nn.Module):
    """The norm that a config asks for: [.., hidden_size] -> same.

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

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return norm(input, self.weight, self.bias, self.eps, rms=self.rms, zero_centered=self.zero_centered)

    def extra_repr(self) -> str:
        return f"{self.hidden_size[0]}, {'RMSNorm' if self.rms else 'LayerNorm'}, eps {self.eps}"
