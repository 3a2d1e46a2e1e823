"""Splitting tensors and vocabularies evenly over ranks."""

from collections.abc import Sequence

import torch

from megatron.core.utils import divide

__all__ = ["VocabUtility", "divide", "split_tensor_along_last_dim"]


def split_tensor_along_last_dim(tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False) -> Sequence[torch.Tensor]:
    """`num_partitions` equal parts of the last dim, as views (copies when `contiguous_split_chunks`)."""
    parts = torch.split(tensor, divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


class VocabUtility:
    """[first, last) of the vocabulary rows that a rank holds."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(per_partition_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        return VocabUtility.vocab_range_from_per_partition_vocab_size(divide(global_vocab_size, world_size), rank, world_size)
