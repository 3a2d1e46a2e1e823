"""Which of torch's operations a piece of code runs, its backward pass included."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountedOperations(TorchDispatchMode):
    """`counts["cat"]`: how often aten::cat ran inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))
