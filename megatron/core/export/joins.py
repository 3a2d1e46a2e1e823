"""How tensors of a Hugging Face file make up one of ours, and back: each rule of the table (hf_families.py) names one of these.

Both directions move rows and compute nothing, so that what is converted and converted back is the same to the bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """What shapes follow from. `vocab` rows are tokens, of the `padded_vocab` that we store."""

    hidden: int
    heads: int
    groups: int
    head: int
    ffn: int
    vocab: int
    padded_vocab: int
    positions: int
    experts: int
    expert_ffn: int
    shared_ffn: int = 0
    # of multi-latent attention
    q_rank: int = 0
    kv_rank: int = 0
    fixed: int = 0  # channels without positions
    turning: int = 0  # channels with positions
    value: int = 0

    def of(self, name: str) -> int:
        """The length of a dimension by the name that the table has for it."""
        derived = {
            "queries": self.heads * self.head,
            "qkv": (self.heads + 2 * self.groups) * self.head,
            "gate_up": 2 * self.ffn,
            "expert_gate_up": 2 * self.expert_ffn,
            "shared_gate_up": 2 * self.shared_ffn,
            "latent_queries": self.heads * (self.fixed + self.turning),
            "latent": self.kv_rank + self.turning,
            "keys_and_values": self.heads * (self.fixed + self.value),
            "values": self.heads * self.value,
        }
        return derived[name] if name in derived else int(getattr(self, name))


@dataclass(frozen=True)
class Join:
    """to_core: the file's tensors, in the rule's order -> ours; to_hf: back."""

    to_core: Callable[[Sequence[Tensor], Sizes], Tensor]
    to_hf: Callable[[Tensor, Sizes], list[Tensor]]


def _qkv(parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """Queries [heads d, ..], keys and values [groups d, ..] -> by group its query heads, its key head, its value head."""
    rest = parts[0].shape[1:]
    return torch.cat([part.reshape(sizes.groups, -1, *rest) for part in parts], dim=1).reshape(-1, *rest)


def _split_qkv(whole: Tensor, sizes: Sizes) -> list[Tensor]:
    rest = whole.shape[1:]
    rows = [sizes.heads // sizes.groups * sizes.head, sizes.head, sizes.head]
    return [part.reshape(-1, *rest) for part in whole.reshape(sizes.groups, -1, *rest).split(rows, dim=1)]


def _pad_vocabulary(parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
    padding = sizes.padded_vocab - sizes.vocab
    return F.pad(parts[0], (0, 0, 0, padding)) if padding else parts[0]


COPY = Join(lambda parts, _: parts[0], lambda whole, _: [whole])
TRANSPOSED = Join(lambda parts, _: parts[0].t(), lambda whole, _: [whole.t()])  # GPT-2's Conv1D: [in, out]
GATE_UP = Join(lambda parts, _: torch.cat(list(parts)), lambda whole, _: list(whole.chunk(2)))
QKV = Join(_qkv, _split_qkv)
# GPT-2's c_attn: one tensor [h, 3 h] (bias [3 h]) with all queries, then all keys, then all values; t() leaves a bias as it is
FUSED_QKV = Join(
    lambda parts, sizes: _qkv(parts[0].t().chunk(3), sizes),
    lambda whole, sizes: [torch.cat(_split_qkv(whole, sizes)).t()],
)
VOCABULARY = Join(_pad_vocabulary, lambda whole, sizes: [whole[: sizes.vocab]])
