"""residual + dropout(x + bias): how a part of a layer joins the residual stream."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

XAndBias = tuple[torch.Tensor, torch.Tensor | None]


def bias_dropout_add(x_with_bias: XAndBias, residual: torch.Tensor, prob: float, training: bool) -> torch.Tensor:
    """x and residual [s, b, h], bias [h] or None. One pass less than the plain twin where nothing is dropped."""
    x, bias = x_with_bias
    if prob == 0.0 or not training:
        return residual + x if bias is None else (residual + x).add_(bias)
    return residual + F.dropout(x if bias is None else x + bias, p=prob, training=training)


def bias_dropout_add_plain(x_with_bias: XAndBias, residual: torch.Tensor, prob: float, training: bool) -> torch.Tensor:
    """The plain twin of bias_dropout_add."""
    x, bias = x_with_bias
    x = x if bias is None else x + bias
    return residual + F.dropout(x, p=prob, training=training)


def get_bias_dropout_add(training: bool, fused: bool) -> Callable[[XAndBias, torch.Tensor, float], torch.Tensor]:
    """The function (x_with_bias, residual, prob) -> sum for a layer in training or not."""
    function = bias_dropout_add if fused else bias_dropout_add_plain
    return lambda x_with_bias, residual, prob: function(x_with_bias, residual, prob, training)
