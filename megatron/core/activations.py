"""Activation functions that torch does not have under these names. Any shape, dtype kept."""

import torch
import torch.nn.functional as F


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2 (So et al. 2021, Primer)."""
    return F.relu(x).square()


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 x), the sigmoid approximation of GELU (Hendrycks and Gimpel 2016)."""
    return x * torch.sigmoid(1.702 * x)


def fast_gelu(x: torch.Tensor) -> torch.Tensor:
    """The tanh approximation of GELU (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")
