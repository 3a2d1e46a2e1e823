"""Rows that a benchmark measured, kept in a JSON file from run to run.

A row is a dict: "part", "row" (its name), "gpus", "result", and numbers where it was measured.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SKIPPED = "skipped"  # the result of what was not begun starts with it
GOOD = ("measured", "passed", "not built", SKIPPED)
Rows = Sequence[dict[str, Any]]


class Results:
    """The rows of this run, and in the file those of earlier ones as well, so that parts run one by one, or side by side, come together.

    A row that is measured again replaces the earlier one; one that is skipped does not.
    """

    def __init__(self, file: Path | None, machine: dict[str, Any], complete: Callable[[Rows], None] = lambda rows: None) -> None:
        """complete: adds to rows what depends on others. Raises ValueError where the file is there and has no rows of this machine: it is
        not written over."""
        self.file, self.machine, self.complete = file, machine, complete
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
            self.complete(self.rows)
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


def write(path: Path, rows: Rows, machine: dict[str, Any]) -> None:
    """Whole or not at all, however the run is cut."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps({"machine": machine, "rows": list(rows)}, indent=1))
    os.replace(beside, path)
