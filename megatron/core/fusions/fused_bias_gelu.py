"""GELU by its tanh approximation (Hendrycks and Gimpel 2016), with the bias of the linear before it."""

import math

import torch
import torch.nn.functional as F


def bias_gelu_impl(input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """gelu(input + bias); any shape [.., n], bias [n] or None."""
    return F.gelu(input if bias is None else input + bias, approximate="tanh")


def bias_gelu_plain(input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The plain twin of bias_gelu_impl."""
    x = input if bias is None else input + bias
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
