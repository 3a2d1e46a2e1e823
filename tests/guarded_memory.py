"""Memory with guards round it: a kernel that reads or writes beyond a tensor, where it leaves out a mask that it needs, is found."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

GUARD = 1 << 17  # bytes on each side: more than a tile of the kernels that are tested with it reaches beyond
_MARK = 0xA5


def surrounded(x: torch.Tensor) -> torch.Tensor:
    """x [m, k] with NaN before, behind and beside it."""
    whole = torch.full((x.shape[0] + 256, x.shape[1] + 128), torch.nan, dtype=x.dtype, device=x.device)
    place = whole[128 : 128 + x.shape[0], : x.shape[1]]
    return place.copy_(x)


@contextmanager
def guarded() -> Iterator[None]:
    """What torch.empty and new_empty make inside has marked bytes before and behind it, which at the end are as they were."""
    made: list[tuple[torch.Tensor, int]] = []
    new_empty = torch.Tensor.new_empty

    def empty(*shape: Any, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        sizes = torch.Size(shape if isinstance(shape[0], int) else shape[0])
        nbytes = sizes.numel() * dtype.itemsize
        whole = torch.full((nbytes + 2 * GUARD,), _MARK, dtype=torch.uint8, device=device)
        made.append((whole, nbytes))
        return whole[GUARD : GUARD + nbytes].view(dtype).view(sizes)

    def empty_like_it(self: torch.Tensor, *shape: Any, **more: Any) -> torch.Tensor:
        if shape == (0,):  # the interpreter's, to be set to memory that there is
            return new_empty(self, *shape, **more)
        return empty(*shape, dtype=more.get("dtype", self.dtype), device=self.device)

    with mock.patch.object(torch, "empty", empty), mock.patch.object(torch.Tensor, "new_empty", empty_like_it):
        yield
    assert made
    for whole, nbytes in made:
        assert bool((whole[:GUARD] == _MARK).all()), "written before a tensor"
        assert bool((whole[GUARD + nbytes :] == _MARK).all()), "written behind a tensor"
