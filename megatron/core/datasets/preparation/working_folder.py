"""`<output-prefix>.partial/`: what an unfinished run has written, and what the next one needs to go on from there.

lock        held by the running tool (a record lock, which ends with it)
plan.json   what decides the bytes: input files (size, time, hash of the head), flags, tokenizer fingerprint
state.json  replaced after each shard: the position in the input, and how much of each file is good, with checksums
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.datasets.preparation.safe_files import replace_file
from megatron.core.datasets.preparation.text_input import Position


class ResumeError(ValueError):
    """An unfinished run that cannot, or must not, be gone on with. The message says why, and what to do."""


@dataclass
class State:
    """Where a run is. `pairs` (by key) and `refused_file` hold what PairWriter and HashedFile need; `finished`: only names are missing."""

    position: Position = field(default_factory=Position)
    bytes_read: int = 0
    documents: int = 0
    refused: int = 0
    pairs: dict[str, Any] = field(default_factory=dict)
    refused_file: dict[str, Any] | None = None
    finished: bool = False

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "State":
        return cls(**{**content, "position": Position(**content["position"])})


def plan_fingerprint(plan: dict[str, Any]) -> str:
    """Equal for runs that give the same bytes."""
    return hashlib.sha256(json.dumps(_comparable(plan), sort_keys=True).encode()).hexdigest()


class WorkingFolder:
    """The folder of one run. `path` is `<output-prefix>.partial`."""

    def __init__(self, output_prefix: str) -> None:
        self.path = f"{output_prefix}.partial"
        self._plan_path, self._state_path = os.path.join(self.path, "plan.json"), os.path.join(self.path, "state.json")

    def file(self, name: str) -> str:
        return os.path.join(self.path, name)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder against other runs, which get ResumeError. Makes it where there is none."""
        try:
            os.makedirs(self.path, exist_ok=True)
            lock = open(self.file("lock"), "a+")  # noqa: SIM115 (record locks end with the file's closing)
        except OSError as error:
            raise ResumeError(f"{self.path}: cannot make this working folder: {error.strerror}") from None
        with lock:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock not inherited by workers, so it ends with this process
            except OSError:
                raise ResumeError(f"{self.path}: another run is writing there; wait for it, or use another --output-prefix") from None
            yield

    def unfinished(self) -> State | None:
        """The state that an earlier run left, None if it left none. Raises ResumeError."""
        if not os.path.exists(self._state_path):
            return None
        try:
            with open(self._state_path, encoding="utf-8") as file:
                return State.from_json(json.load(file))
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ResumeError(f"{self._state_path}: cannot be understood ({error!r}); remove {self.path} to start again") from None

    def begin(self, plan: dict[str, Any]) -> None:
        """Throw away what is there, and note the plan."""
        for entry in Path(self.path).iterdir():
            if entry.name != "lock":
                entry.unlink()
        replace_file(self._plan_path, json.dumps(plan, indent=1).encode())

    def check_plan(self, plan: dict[str, Any]) -> None:
        """Raises ResumeError where the earlier run's plan would have given other bytes."""
        try:
            with open(self._plan_path, encoding="utf-8") as file:
                earlier = json.load(file)
            differences = list(_differences(earlier, plan))
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise ResumeError(f"{self._plan_path}: cannot be understood ({error!r}); remove {self.path} to start again") from None
        if differences:
            advice = f"go on with what it was begun with, or remove {self.path} to start again"
            raise ResumeError("\n  ".join([f"--resume: {self.path} holds a run that would give other bytes:", *differences, advice]))

    def commit(self, state: State) -> None:
        """From now on a later run goes on from `state`. Raises WriteError."""
        replace_file(self._state_path, json.dumps(asdict(state), indent=1).encode())

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _comparable(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan without the names of input files, which do not decide bytes."""
    inputs = [{name: value for name, value in entry.items() if name != "path"} for entry in plan["inputs"]]
    return {**plan, "inputs": inputs}


def _differences(earlier: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    if len(earlier["inputs"]) != len(now["inputs"]):
        yield f"--input named {len(earlier['inputs'])} files, now {len(now['inputs'])}"
    else:
        pairs = zip(earlier["inputs"], now["inputs"], _comparable(earlier)["inputs"], _comparable(now)["inputs"])
        for before, after, comparable_before, comparable_after in pairs:
            if comparable_before != comparable_after:
                changed = [name for name in comparable_after if comparable_after[name] != comparable_before.get(name)]
                same = "has changed" if before["path"] == after["path"] else f"is not {before['path']}"
                yield f"--input {after['path']} {same} ({', '.join(changed)})"
    for section in ("flags", "tokenizer"):
        for name in sorted(set(earlier[section]) | set(now[section])):
            before, after = earlier[section].get(name), now[section].get(name)
            if before != after:
                what = f"--{name.replace('_', '-')}" if section == "flags" else f"the tokenizer's {name}"
                yield f"{what} was {before}, now {after}"
