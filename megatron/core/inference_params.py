"""The key and value cache of a generation in progress."""

import torch


class InferenceParams:
    """Cache of keys and values per layer number, for batches up to `max_batch_size` and `max_sequence_length` tokens."""

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        self.max_batch_size = max_batch_size
        self.max_sequence_length = max_sequence_length
        self.reset()

    def reset(self) -> None:
        self.sequence_len_offset = 0
        self.batch_size_offset = 0
        self.key_value_memory_dict: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def is_static_batching(self) -> bool:
        return True
