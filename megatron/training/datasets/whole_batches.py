"""A held-out set that fills its last global batch."""

from typing import Any

import torch


class WholeBatches(torch.utils.data.Dataset):
    """`dataset`, made as long as whole batches of `batch` samples need: what is added repeats its last sample without any loss.

    So each of its samples counts once, and all ranks and pipeline stages see batches of one shape. Raises ValueError for samples without a
    `loss_mask`, which cannot be left out of a mean.
    """

    def __init__(self, dataset: Any, batch: int) -> None:
        self.dataset = dataset
        self.size = -(-len(dataset) // batch) * batch

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if index < len(self.dataset):
            return self.dataset[index]
        sample = self.dataset[len(self.dataset) - 1]
        if "loss_mask" not in sample:
            given = f"{len(self.dataset)} samples do not fill the last batch, and they have no loss_mask to leave out what is added"
            raise ValueError(f"--full-validation: {given}; use a number of held-out samples that --global-batch-size divides")
        return {**sample, "loss_mask": torch.zeros_like(sample["loss_mask"])}
