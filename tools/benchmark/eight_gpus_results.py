"""What eight_gpus.py found, for people: the table, and the numbers of a row that depend on others (rows: results.py)."""

from typing import Any

from results import Rows

ALONE = "llama8L, one GPU"


def add_efficiency(rows: Rows) -> None:
    """To the rows of scaling: FLOPs a second of a GPU, relative to one GPU alone."""
    alone = next((row["tflops"] for row in rows if row["row"] == ALONE and row.get("tflops")), None)
    for row in rows:
        if alone and row["part"] == "scaling" and row.get("tflops"):
            row["efficiency"] = row["tflops"] / alone


# --- the table ---


def verdict(row: dict[str, Any]) -> str:
    """The goal of a row, and whether it is reached."""
    if row.get("goal") is None:
        return ""
    name, least = row["goal"]
    value = row.get(name)
    return f"{name} >= {least:.2f}: " + ("not measured" if value is None else "reached" if value >= least else f"missed, {value:.3f}")


def layouts_table(rows: Rows) -> list[str]:
    lines = [f"{'layout':26} {'ranks':>5} {'dtype':9} {'first loss':>11} {'later loss':>11} {'grad. norm':>11} {'gradient':>11}  result"]
    for row in rows:
        differences = row.get("differences", {})
        cells = [f"{differences[kind]:11.1e}" if kind in differences else f"{'-':>11}" for kind in KINDS]
        lines.append(f"{row['row']:26} {row['gpus']:5d} {row.get('dtype', '-'):9} {' '.join(cells)}  {row['result']}")
    return lines


KINDS = ("first loss", "later loss", "gradient norm", "gradient")
# heading, number of a row, format
COLUMNS = (
    ("ms", "elapsed_ms", ",.0f"),
    ("tokens/s/GPU", "tokens_per_second_per_gpu", ",.0f"),
    ("TFLOP/s", "tflops", ".1f"),
    ("MFU", "mfu", ".1%"),
    ("GiB", "peak_memory_gib", ".1f"),
    ("comm. ms", "communication_ms", ".1f"),
    ("exposed", "exposed_ms", ".1f"),
    ("idle", "idle_ms", ".1f"),
    ("all-to-all", "all_to_all_share", ".1%"),
    ("efficiency", "efficiency", ".3f"),
)


def trainings_table(rows: Rows, goals: bool) -> list[str]:
    wide = max([len(row["row"]) for row in rows] + [3])
    lines = [f"{'row':{wide}} GPUs " + " ".join(f"{heading:>{max(8, len(heading))}}" for heading, _, _ in COLUMNS) + "  result"]
    for row in rows:
        cells = []
        for heading, key, form in COLUMNS:
            value = row.get(key)
            shown = "-" if value is None or (key == "all_to_all_share" and row["part"] != "mixtral") else format(value, form)
            cells.append(f"{shown:>{max(8, len(heading))}}")
        result = "; ".join(filter(None, (row["result"].splitlines()[0], verdict(row) if goals else "")))
        lines.append(f"{row['row']:{wide}} {row['gpus']:4d} {' '.join(cells)}  {result}")
    return lines


LAYOUTS_HEAD = "Layouts: the largest relative difference of any rank, step and model from one process"
TRAININGS_HEAD = (
    "Trainings. Of a step on rank 0: communication with its waiting for other ranks, exposed (no other kernel runs), idle (no kernel at "
    "all), ms.\nMemory: the last rank's peak. MFU: against the bf16 peak. Efficiency: TFLOP/s of a GPU relative to one GPU alone."
)


def table(rows: Rows, dry: bool) -> str:
    """For people: layouts, then trainings."""
    lines = ["DRY: tiny models on the CPU over gloo; no time or rate below means anything"] if dry else []
    layouts = [row for row in rows if row["part"] == "layouts"]
    trainings = [row for row in rows if row["part"] != "layouts"]
    if layouts:
        lines += ["", LAYOUTS_HEAD, *layouts_table(layouts)]
    if trainings:
        lines += ["", TRAININGS_HEAD, *trainings_table(trainings, goals=not dry)]
    return "\n".join(lines)
