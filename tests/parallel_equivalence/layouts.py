"""The table: which ways to spread a model over processes train the same model as one process, on which models, within what.

A new layout is one line in LAYOUTS, a new model one entry of MODELS. `make test` runs the fast lines, `make test-layouts` all of them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Layout:
    """One way to train. Sizes are in ranks; what is left out is off."""

    name: str
    tp: int = 1
    sp: bool = False
    dp: int = 1
    pp: int = 1
    vpp: int | None = None  # chunks of a pipeline rank
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    distributed_optimizer: bool = False
    overlap: bool = False  # of gradient reduction with the backward pass
    recompute: str | None = None
    per_token: bool = False  # the loss is normalised by the step's valid tokens instead of micro batch by micro batch
    microbatches: int = 1  # of a data-parallel rank in one step
    models: tuple[str, ...] = ("gpt", "llama")
    fast: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def global_microbatches(self) -> int:
        return self.dp * self.microbatches


LAYOUTS = (
    Layout("dp2", dp=2, overlap=True, fast=True),
    Layout("dp2 accumulation", dp=2, microbatches=2, overlap=True),
    Layout("dp2 per-token", dp=2, microbatches=2, per_token=True),
    Layout("dp4", dp=4),
    Layout("dp4 per-token", dp=4, per_token=True),
    Layout("tp2", tp=2, models=("gpt", "llama", "norms"), fast=True),
    Layout("tp2 accumulation", tp=2, microbatches=3),
    Layout("tp2 per-token", tp=2, microbatches=2, per_token=True),
    Layout("tp4", tp=4),
    Layout("tp2 sp", tp=2, sp=True, models=("gpt", "llama", "norms"), fast=True),
    Layout("tp2 sp accumulation", tp=2, sp=True, microbatches=3),
    Layout("tp4 sp", tp=4, sp=True, microbatches=2),
    Layout("tp2 dp2", tp=2, dp=2, microbatches=2),
    Layout("tp2 dp2 overlap", tp=2, dp=2, microbatches=2, overlap=True),
    Layout("tp2 sp dp2", tp=2, sp=True, dp=2),
    Layout("tp2 sp dp2 per-token", tp=2, sp=True, dp=2, microbatches=2, per_token=True, overlap=True, fast=True),
    Layout("tp4 dp2", tp=4, dp=2),
    Layout("tp2 sp dp4 accumulation", tp=2, sp=True, dp=4, microbatches=2),
    Layout("tp4 sp dp2 per-token", tp=4, sp=True, dp=2, per_token=True),
)

NUM_LAYERS, HIDDEN, HEADS, SEQ, MICRO_BATCH = 2, 32, 4, 16, 2
TOKENS, DIVISIBLE_BY = 45, 8  # 48 rows of the vocabulary on one or two tensor-parallel ranks, 64 on four
STEPS = 10


@dataclass(frozen=True)
class Model:
    """A small model: TransformerConfig's fields, and GPTModel's arguments."""

    config: dict[str, Any]
    tied: bool
    position: str


MODELS = {
    "gpt": Model({}, tied=True, position="learned_absolute"),
    "llama": Model(
        {
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "bias_activation_fusion": True,
            "add_bias_linear": False,
            "num_attention_heads": 8,
            "num_query_groups": 4,
            "ffn_hidden_size": 80,
        },
        tied=False,
        position="rope",
    ),
    # norms of queries and keys: replicated weights that see sharded heads
    "norms": Model({"qk_layernorm": True, "layernorm_zero_centered_gamma": True, "add_qkv_bias": True}, tied=True, position="rope"),
}

# dtype -> kind of number -> largest difference, relative to the largest element of the tensor that one process computes.
TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {
        "forward": 1e-9,
        "gradient": 1e-9,
        "gradient norm": 1e-9,
        "first loss": 1e-9,
        "later loss": 1e-9,
        "trained weight": 1e-9,
    },
    # no weights: Adam makes steps of full size from gradients that are zero but for rounding (the bias of keys)
    torch.float32: {"forward": 1e-5, "gradient": 1e-5, "gradient norm": 1e-5, "first loss": 1e-5, "later loss": 1e-5},
}
