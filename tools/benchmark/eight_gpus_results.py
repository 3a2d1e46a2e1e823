"""What eight_gpus.py found: rows in a JSON file, from run to run, and the table for people.

A row is a dict: "part", "row" (its name), "gpus", "result", and numbers where it was measured.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ALONE = "llama8L, one GPU"
SKIPPED = "skipped"  # the result of what was not begun starts with it
GOOD = ("measured", "passed", "not built", SKIPPED)


class Results:
    """The rows of this run, and in the file those of earlier ones as well, so that parts run one by one, or side by side, come together.

    A row that is measured again replaces the earlier one; one that is skipped does not.
    """

    def __init__(self, file: Path | None, machine: dict[str, Any]) -> None:
        """Raises ValueError where the file is there and has no rows of this machine: it is not written over."""
        self.file, self.machine = file, machine
        self.own: list[dict[str, Any]] = []
        self.rows = self._stored()

    def keep(self, **row: Any) -> None:
        """Add a row; the file has it when this returns."""
        self.own.append(row)
        with self._locked():
            stored = self._stored()
            measured = {_name(row) for row in stored if not _is_skipped(row)}
            mine = [row for row in self.own if not (_is_skipped(row) and _name(row) in measured)]
            names = {_name(row) for row in mine}
            self.rows = [row for row in stored if _name(row) not in names] + mine
            add_efficiency(self.rows)
            if self.file is not None:
                write(self.file, self.rows, self.machine)

    def failed(self) -> list[str]:
        """Names of the rows of this run that went wrong."""
        return list(dict.fromkeys(row["row"] for row in self.own if not row["result"].startswith(GOOD)))

    def skipped(self) -> list[str]:
        return [row["row"] for row in self.own if _is_skipped(row)]

    def _stored(self) -> list[dict[str, Any]]:
        """Rows of the file."""
        if self.file is None or not self.file.exists():
            return []
        try:
            stored = json.loads(self.file.read_text())
            machine, rows = stored["machine"], list(stored["rows"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.file} is there and has no rows of this script: give another file") from None
        if machine != self.machine:
            raise ValueError(f"{self.file} has rows of {machine}, and this is {self.machine}: give another file")
        return rows

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time reads and writes the file."""
        if self.file is None:
            yield
            return
        folder = os.open(self.file.absolute().parent, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


def _name(row: dict[str, Any]) -> tuple[str, str]:
    return row["part"], row["row"]


def _is_skipped(row: dict[str, Any]) -> bool:
    return row["result"].startswith(SKIPPED)


def write(path: Path, rows: Sequence[dict[str, Any]], machine: dict[str, Any]) -> None:
    """Whole or not at all, however the run is cut."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps({"machine": machine, "rows": list(rows)}, indent=1))
    os.replace(beside, path)


def add_efficiency(rows: Sequence[dict[str, Any]]) -> None:
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


def layouts_table(rows: Sequence[dict[str, Any]]) -> list[str]:
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


def trainings_table(rows: Sequence[dict[str, Any]], goals: bool) -> list[str]:
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


def table(rows: Sequence[dict[str, Any]], dry: bool) -> str:
    """For people: layouts, then trainings."""
    lines = ["DRY: tiny models on the CPU over gloo; no time or rate below means anything"] if dry else []
    layouts = [row for row in rows if row["part"] == "layouts"]
    trainings = [row for row in rows if row["part"] != "layouts"]
    if layouts:
        lines += ["", LAYOUTS_HEAD, *layouts_table(layouts)]
    if trainings:
        lines += ["", TRAININGS_HEAD, *trainings_table(trainings, goals=not dry)]
    return "\n".join(lines)
