"""Where a step's time goes, by kind of kernel, against the floor: what `train.py NAME --breakdown` prints.

Kernels are told apart by their names, those that torch's profiler writes to kernels-rank-0.json. A kind is the first whose pattern fits.
"""

import json
import re
from pathlib import Path

KINDS = (
    ("communication", r"nccl|symm_mem|all_gather|reduce_scatter|memcpy ptop"),  # the last: copy engines, between GPUs
    ("attention", r"sdpa|flash|fmha|attention"),
    ("matrix products", r"gemm|scaled_mm|nvjet|cutlass|cublas|xmma|ampere_|sm90_|sm100_|splitk"),
    ("optimizer", r"adam|multi_tensor|foreach|lpnorm|l2norm"),
    ("FP8 quantization", r"quantize|amax"),
    ("cross-entropy", r"cross_entropy"),
    ("norms, activations, RoPE", r"norm|swiglu|gelu|rope|silu|layer_norm"),
    ("experts' rows", r"permute|take_rows|sum_rows|sort|scatter|gather|index"),
    ("copies and fills", r"memcpy|memset|copy|fill|cat"),
    ("pointwise, sums", r"elementwise|reduce|vectorized|add|mul"),
)
OTHER = "other"
# ms a step on one H200: each kind's kernels alone, by the best that torch offers, on a warm card: a profiled step, on a cooler one, may
# take less. FP8, with one scale: in the layers' products.
_ONE_SCALE = {"matrix products": 419, "attention": 125, "optimizer": 20}
FLOORS = {
    "llama8L": {"matrix products": 655, "attention": 125, "optimizer": 20},
    "llama8L-fp8-delayed": _ONE_SCALE,
    "llama8L-fp8-tensorwise": _ONE_SCALE,
    "gpt345m": {"matrix products": 197, "attention": 70, "optimizer": 2},
    "moe8x": {"matrix products": 255, "attention": 33, "optimizer": 21},
}


def floor_of(configuration: str) -> dict[str, int]:
    """Of a named configuration of train.py; empty where none is known."""
    return FLOORS.get(configuration, {})


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), OTHER)


def breakdown(kernels: Path) -> dict[str, dict[str, float]]:
    """Kind -> {"ms", "calls"} a step, the longest first; of the profile that the trainer's --use-pytorch-profiler wrote."""
    found: dict[str, dict[str, float]] = {}
    for name, spent in json.loads(kernels.read_text()).items():
        row = found.setdefault(kind_of(name), {"ms": 0.0, "calls": 0.0})
        row["ms"] += spent["ms"]
        row["calls"] += spent["calls"]
    return dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))


def table(rows: dict[str, dict[str, float]], configuration: str, step_ms: float) -> str:
    """For people. Kernels that overlap count each for itself, so that their sum may be above the step's time."""
    floors = floor_of(configuration)
    lines = [f"{'kind of kernel':26} {'ms / step':>10} {'of step':>8} {'calls':>7} {'floor':>6}"]
    for kind, row in rows.items():
        floor = f"{floors[kind]:6d}" if kind in floors else f"{'-':>6}"
        lines.append(f"{kind:26} {row['ms']:10.1f} {row['ms'] / step_ms:8.1%} {row['calls']:7.0f} {floor}")
    total, calls = (sum(row[key] for row in rows.values()) for key in ("ms", "calls"))
    floor = f"{sum(floors.values()):6d}" if floors else f"{'-':>6}"
    lines.append(f"{'all kernels':26} {total:10.1f} {total / step_ms:8.1%} {calls:7.0f} {floor}")
    return "\n".join(lines)
