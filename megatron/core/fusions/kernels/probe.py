"""The smallest kernel: does Triton find a compiler here, and does the device take what it makes?"""

import torch
import triton
import triton.language as tl

from megatron.core import device


@triton.jit
def probe_double(x, SIZE: tl.constexpr):
    place = x + tl.arange(0, SIZE)
    tl.store(place, tl.load(place) * 2)


def probe() -> None:
    """Raises whatever goes wrong. Waits for the device."""
    x = torch.ones(16, device=device.current_device())
    probe_double[(1,)](x, SIZE=16)
    found = x.tolist()
    if found != [2.0] * 16:
        raise RuntimeError(f"a kernel that doubles ones gave {found}")
