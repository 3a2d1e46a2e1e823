"""Parts that do nothing: what a spec names where a layer has no norm, no second attention, ..."""

from typing import Any

import torch


class IdentityOp(torch.nn.Module):
    """Takes any constructor arguments; returns its first input."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


class IdentityFuncOp(IdentityOp):
    """In the place of a function that makes a function, such as get_bias_dropout_add."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward
