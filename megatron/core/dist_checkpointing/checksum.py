"""The checksum of what a checkpoint stores: as fast as memory, where CRC-32 alone takes longer than a warm read. No torch.

On disk (ours): "algorithm" in `checksums.json` is a name of ALGORITHMS. The checksum of some bytes by `crc32-of-sums` is the CRC-32 of
sums: of each half MiB, seen as rows of 512 little-endian 64-bit words (the last row filled up with zeros), all rows' sums, then all
columns' sums, modulo 2^64. Whatever changes the words of one row or one column alone, and any change of up to three words of such a block,
changes a sum.
"""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

BLOCK = 2**19  # bytes that are summed at a time; they fit the cache
ROW = 4096  # bytes


def crc32_of_sums(data: Any, before: int = 0) -> int:
    """The checksum of bytes that follow those whose checksum is `before`, which were a multiple of BLOCK (nothing else follows less)."""
    view = memoryview(data).cast("B")
    for start in range(0, len(view), BLOCK):
        piece: Any = view[start : start + BLOCK]
        if rest := len(piece) % ROW:
            piece = bytes(piece) + bytes(ROW - rest)
        words = np.frombuffer(piece, dtype="<u8").reshape(-1, ROW // 8)
        for axis in (1, 0):
            before = zlib.crc32(np.add.reduce(words, axis=axis), before)
    return before


Algorithm = Callable[[Any, int], int]  # (bytes, checksum of what is before them) -> checksum; pieces are multiples of BLOCK but the last
ALGORITHMS: dict[str, Algorithm] = {"crc32-of-sums": crc32_of_sums, "crc32": zlib.crc32}
WRITTEN = "crc32-of-sums"  # crc32: what was written before
