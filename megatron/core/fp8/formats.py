"""The two FP8 formats, and the scale that brings a tensor into one."""

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
SMALLEST_AMAX = 2.0**-64  # below it a tensor counts as this large: its scale, and the inverse, stay normal numbers
_EXPONENT = 0x7F800000


def scale_for(amax: torch.Tensor, largest: float | torch.Tensor) -> torch.Tensor:
    """amax fp32, any shape -> the largest power of two with scale * amax <= largest. inf gives 0: the tensor will be all NaN."""
    # a number divided by a tensor is, to torch, the number times the reciprocal, which of the largest amax is subnormal: digits are lost
    top = largest if isinstance(largest, torch.Tensor) else torch.full_like(amax, largest)
    room = top / amax.clamp(min=SMALLEST_AMAX)
    return (room.view(torch.int32) & _EXPONENT).view(torch.float32)


def amax_of(x: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """The largest magnitude in fp32, of all or along `dim`; inf where something is not finite; 0 of nothing."""
    if dim is None and not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return torch.linalg.vector_norm(x, float("inf"), dim=dim).float().nan_to_num(nan=float("inf"), posinf=float("inf"))


def round_to(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x * scale in FP8, what is too large as the largest. What is not finite becomes NaN: no infinity is hidden by saturation."""
    largest, scaled = LARGEST[dtype], x.float() * scale
    return torch.where(scaled.isfinite(), scaled.clamp(-largest, largest), float("nan")).to(dtype)
