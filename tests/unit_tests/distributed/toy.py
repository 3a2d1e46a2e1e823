"""A small model with everything that gradients can do: tied weights, direct weight gradients, a parameter that takes no part."""

from typing import Any

import torch
from torch import nn

from megatron.core.tensor_parallel.weight_grad import write_weight_grad


class _DirectLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight = weight
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (inputs,) = ctx.saved_tensors
        weight = ctx.weight
        if hasattr(weight, "main_grad"):
            write_weight_grad(weight, grads[0], inputs)
            return grads[0] @ weight, None
        return grads[0] @ weight, grads[0].t() @ inputs


class Toy(nn.Module):
    """Tokens [n] -> loss per token [n] of predicting the token itself; the head is the embedding."""

    def __init__(self, seed: int = 1, vocab: int = 30, hidden: int = 12) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) * 0.3)

        self.embedding: Any = nn.Module()
        self.embedding.word_embeddings = nn.Module()
        self.embedding.word_embeddings.weight = weight(vocab, hidden)
        self.norm_weight = nn.Parameter(torch.ones(hidden))
        self.fc1 = weight(40, hidden)
        self.bias = nn.Parameter(torch.zeros(40))
        self.fc2 = weight(hidden, 40)
        self.unused = weight(7, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        table = self.embedding.word_embeddings.weight
        hidden = table[tokens]
        normed = nn.functional.layer_norm(hidden, hidden.shape[-1:]) * self.norm_weight
        hidden = hidden + _DirectLinear.apply(torch.tanh(_DirectLinear.apply(normed, self.fc1) + self.bias), self.fc2)
        logits = _DirectLinear.apply(hidden, table)
        return nn.functional.cross_entropy(logits.double() if logits.dtype == torch.float64 else logits.float(), tokens, reduction="none")


def batch(step: int, size: int = 32, vocab: int = 30) -> torch.Tensor:
    return torch.randint(0, vocab, (size,), generator=torch.Generator().manual_seed(100 + step))
