"""Which rank failed first: told once, by one rank, and known to all before they end.

Every rank has a thread that once a second writes a sign of life (phase, iteration, last collective) to the store through which the ranks
met, and looks whether a failure is on record there. A rank that fails puts its failure on record before it ends, if none is there yet.
One that fails because a peer is gone, or that is told to end (SIGTERM from a launcher), first looks for the peer's record, then for a
peer that gives no sign of life any more and puts that on record for it. After a collective's timeout a table says where each rank is.
A rank whose main thread hangs in the device's driver ends by its thread. Works the same over gloo and NCCL.
"""

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from megatron.core import device
from megatron.training import last_seen, phase
from megatron.training.arguments import record_for_elastic
from megatron.training.training_log import print_line

NCCL_PATIENCE = 20.0  # seconds after this watch that NCCL's own watchdog ends a process, without a word on where the others are
RECORD = "megatron/first_failure"
SIGNS = "megatron/sign_of_life"
BEAT = 1.0  # seconds between signs of life
SILENT = 5.0  # seconds without one after which, when something has failed, a rank is taken for dead
SILENT_IN_TRAINING = 40.0  # the same when all seems well but this rank has waited as long itself
LEFT = "megatron/left"
LINGER = 10.0  # seconds that the keeper of the store waits for the others to read it
LEAVE = 3.0  # seconds that a rank may take to end by itself once a failure is on record
STORE_TIMEOUT = 10.0
# what an exception says when it is the other end that failed
PEERS_FAULT = ("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting", "timed out", "Connection refused", "NCCL", "gloo")
TIMED_OUT = ("Timed out waiting", "timed out", "timeout")


class FailureWatch:
    """The record, the signs of life, and the thread that looks after both. One in a process, in worlds of several ranks."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.timeout: float = 0.0  # of collectives, for the report
        self.to_tell = False  # whether it is this rank that put the failure on record, and so prints it
        self.store_is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._lock = threading.Lock()  # a store's connection serves one caller at a time
        self._ending = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._moved_at, self._progress = time.monotonic(), (0, 0, "", 0)
        self._beats = 0
        self._previous_wakeup: int | None = None
        self._previous_handler: Any = None
        self._leaving_since: float | None = None
        self._knows_why = False
        self._thread = threading.Thread(target=self._look, name="failure watch", daemon=True)

    def start(self) -> None:
        """From the main thread: begin to watch. SIGTERM, unless somebody else handles it, ends this rank after a report."""
        last_seen.record()
        self._previous_wakeup = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            # a handler of Python's own, so that the C one wakes the thread; the main thread may be in a collective for long
            self._previous_handler = signal.signal(signal.SIGTERM, _ignore)
        self._write_sign()
        self._thread.start()

    def expect_end(self) -> None:
        """All went well: from now on a store or a peer that is gone is no failure. The last sign of life tells peers who still work."""
        self._ending.set()
        with suppress(RuntimeError):
            self._write_sign()

    def stop(self) -> None:
        """End the thread and undo what `start` did. From the main thread."""
        self._ending.set()
        os.write(self._wake_write, b"\0")
        self._thread.join()
        signal.set_wakeup_fd(-1 if self._previous_wakeup is None else self._previous_wakeup)
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
        os.close(self._wake_read)
        os.close(self._wake_write)
        last_seen.stop()

    # --- the record ---

    def claim(self, message: str) -> str:
        """Put `message` on record as the first failure. Returns what is on record: another rank's, if that came first."""
        entry = f"{self.rank}\n{message}"
        known = self._ask(lambda: self.store.compare_set(RECORD, "", entry)).decode()
        self.to_tell = known == entry
        return known.partition("\n")[2]

    def on_record(self) -> str | None:
        found = self._ask(lambda: self.store.check([RECORD]))
        return self._ask(lambda: self.store.get(RECORD)).decode().partition("\n")[2] if found else None

    def first_failure(self, own: str, error: BaseException) -> str:
        """What failed first: this rank with `own`, or what made it fail. On record when this returns."""
        text = f"{type(error).__name__}: {error}"
        try:
            if not any(part in text for part in PEERS_FAULT):
                return self.claim(own)
            if any(part in text for part in TIMED_OUT):
                return self.on_record() or self._claim_timeout()
            return self._whose_fault() or self.claim(own)
        except RuntimeError as failure:  # the store is gone, and with it who knew more
            self.to_tell = True
            return f"{own} (and the store of rank 0, or of the launcher, is gone: {failure})"

    def _whose_fault(self) -> str | None:
        """The failure that is on record soon, or a peer that gives no sign of life, which is put on record."""
        before = self._signs()
        changed = {self.rank} | {rank for rank, sign in enumerate(before) if sign["done"]}
        end = time.monotonic() + SILENT
        while time.monotonic() < end:
            if (found := self.on_record()) is not None:
                return found
            time.sleep(0.2)
            self._write_sign()  # the thread may be the caller
            now = self._signs()
            changed |= {rank for rank in range(self.world_size) if now[rank]["beat"] != before[rank]["beat"] or now[rank]["done"]}
            if len(changed) == self.world_size:
                end = min(end, time.monotonic() + 2 * BEAT)  # all live: the record may still come
        silent = [rank for rank in range(self.world_size) if rank not in changed]
        return self._claim_silent(silent, self._signs()) if silent else None

    def _claim_silent(self, silent: list[int], signs: list[dict]) -> str:
        if self.timeout and all(signs[rank]["still"] >= 0.8 * self.timeout for rank in silent):
            return self._claim_timeout()  # NCCL's own watchdog ended them
        first = signs[silent[0]]
        others = f"; ranks {', '.join(map(str, silent[1:]))} as well" if len(silent) > 1 else ""
        return self.claim(
            f"rank {silent[0]}, phase {first['phase']}, iteration {first['iteration']}: no sign of life since: it was killed, ran out "
            f"of memory, or its machine is gone ({first['collective']}){others}"
        )

    def _claim_timeout(self) -> str:
        signs = self._signs()
        absent = [rank for rank, sign in enumerate(signs) if not sign["waiting"]]
        guilty = absent or [min(range(self.world_size), key=lambda rank: (signs[rank]["iteration"], signs[rank]["count"]))]
        sign, waiting = signs[guilty[0]], self.world_size - len(absent)
        message = (
            f"rank {guilty[0]}, phase {sign['phase']}, iteration {sign['iteration']}: TimeoutError: no progress for {sign['still']:.0f} s "
            f"at {sign['line']}, while {waiting} ranks wait in collectives"
        )
        known = self.claim(message)
        if self.to_tell:
            print_line(table(signs), sys.stderr)
        return known

    def leave(self, code: int) -> NoReturn:
        """End the process now; the one that keeps the store only when the others have had time to read from it."""
        sys.stdout.flush()
        sys.stderr.flush()
        with suppress(RuntimeError):
            self._ask(lambda: self.store.set(f"{LEFT}/{self.rank}", ""))
            names = [f"{LEFT}/{rank}" for rank in range(self.world_size)]
            end = time.monotonic() + LINGER
            # under torchrun the store is the launcher's
            while self.rank == 0 and not self.store_is_launchers and time.monotonic() < end:
                if self._ask(lambda: self.store.check(names)):
                    break
                time.sleep(0.1)
        os._exit(code)

    # --- signs of life ---

    def _sign(self) -> dict[str, Any]:
        now, progress = time.monotonic(), (*last_seen.progress(), *phase.current())
        if progress != self._progress:
            self._moved_at, self._progress = now, progress
        self._beats += 1
        name, iteration = phase.current()
        return {
            "beat": self._beats,
            "phase": name,
            "iteration": iteration,
            "collective": last_seen.collective(),
            "count": last_seen.progress()[0],
            "waiting": last_seen.is_waiting(),
            "line": last_seen.line(),
            "still": round(now - self._moved_at, 1),
            "done": self._ending.is_set(),
        }

    def _write_sign(self) -> dict[str, Any]:
        with self._lock:  # around both, so that what `expect_end` writes stays the last word
            sign = self._sign()
            self.store.set(f"{SIGNS}/{self.rank}", json.dumps(sign))
        return sign

    def _signs(self) -> list[dict[str, Any]]:
        """Of all ranks; of one that never gave any, an empty one."""
        never = {"beat": 0, "phase": "start-up", "iteration": 0, "collective": "", "count": 0, "waiting": False, "line": "", "still": 0.0}
        never["done"] = False
        found = []
        for rank in range(self.world_size):
            name = f"{SIGNS}/{rank}"
            known = self._ask(lambda name=name: self.store.check([name]))  # type: ignore[misc]
            found.append(json.loads(self._ask(lambda name=name: self.store.get(name))) if known else never)  # type: ignore[misc]
        return found

    def _ask(self, call: Callable[[], Any]) -> Any:
        with self._lock:
            return call()

    # --- the thread ---

    def _look(self) -> None:
        neighbour, seen, seen_at = (self.rank + 1) % self.world_size, None, time.monotonic()
        while not self._ending.is_set():
            if self._signals() == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is _ignore:
                self._end_by_signal()
            if self._ending.is_set():
                return
            try:
                own = self._write_sign()
                if self.on_record() is not None:
                    self._leave_soon()
                elif self.timeout and own["waiting"] and own["still"] > self.timeout:
                    # here, because gloo does not take another timeout after its start
                    self._tell(self._claim_timeout())
                    self.leave(1)
                sign = json.loads(self._ask(lambda: self.store.get(f"{SIGNS}/{neighbour}")))
            except RuntimeError as failure:
                if not self._ending.is_set():
                    self._leave_soon(failure)
                continue
            now = time.monotonic()
            if sign["beat"] != seen or not sign["iteration"] or sign["done"]:
                seen, seen_at = sign["beat"], now
            elif min(now - seen_at, now - self._moved_at) > SILENT_IN_TRAINING:
                self._tell(self._claim_silent([neighbour], self._signs()))
                self.leave(1)

    def _signals(self) -> int:
        """The number of a signal that came, else 0 after a beat."""
        ready, _, _ = select.select([self._wake_read], [], [], BEAT)
        received = os.read(self._wake_read, 64) if ready else b""
        return signal.SIGTERM if signal.SIGTERM in received else 0

    def _leave_soon(self, failure: Exception | None = None) -> None:
        """Something failed elsewhere: give the main thread time to notice by itself, then end the process."""
        if self._leaving_since is None:
            self._leaving_since, self._knows_why = time.monotonic(), failure is None
        if failure is not None:
            time.sleep(BEAT / 2)
        if time.monotonic() - self._leaving_since < LEAVE:
            return
        if failure is not None and not self._knows_why:
            self.to_tell = True
            lost = "lost the store through which the ranks met; rank 0, or the launcher that kept it, is gone"
            self._tell(f"{self._here()}: {lost} ({failure})")
        self.leave(1)

    def _here(self) -> str:
        name, iteration = phase.current()
        return f"rank {self.rank}, phase {name}, iteration {iteration}"

    def _end_by_signal(self) -> None:
        """SIGTERM: a launcher's, because a peer failed, or somebody's who wants the run to end."""
        try:
            found = self.on_record() or self._whose_fault()
            asked = "ended by SIGTERM, and no rank had failed; with --exit-signal-handler a run saves first"
            self._tell(found or self.claim(f"{self._here()}: {asked}"))
        except RuntimeError:
            pass
        self.leave(128 + signal.SIGTERM)

    def _tell(self, message: str) -> None:
        """Leave to torchrun and print what failed first, unless that is another rank's to do."""
        if not self.to_tell:
            return
        record_for_elastic(message)
        sys.stdout.flush()
        print_line(f"ERROR: {message}", sys.stderr)
        self.to_tell = False  # the main thread may fail while the process is leaving


def _ignore(number: int, frame: Any) -> None:
    """The watch's thread ends the process."""


def table(signs: list[dict[str, Any]]) -> str:
    """Where every rank is, a line each."""
    heads = ("rank", "iteration", "phase", "no progress", "last collective", "at")
    rows = [
        (str(rank), str(sign["iteration"]), sign["phase"], f"{sign['still']:.0f} s", sign["collective"], sign["line"])
        for rank, sign in enumerate(signs)
    ]
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [heads, *rows]]
    return "\n".join(["where every rank was:", *lines])


_watch: list[FailureWatch] = []  # one, in worlds of several ranks


def watch() -> FailureWatch | None:
    return _watch[0] if _watch else None


def timeout_of_groups(seconds: float) -> timedelta:
    """The timeout to give process groups so that collectives end after `seconds`, and by this watch."""
    return timedelta(seconds=seconds + (NCCL_PATIENCE if device.has_accelerator() else 0.0))


def start(timeout: float) -> None:
    """Begin to watch the peers, when there are any; `timeout` is that of collectives, in seconds.

    The default process group must exist. Call from the main thread.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or _watch:
        return
    # a connection of its own: the main one may be held by a rendezvous that waits
    store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=STORE_TIMEOUT))
    started = FailureWatch(store, dist.get_rank(), dist.get_world_size())
    started.timeout = timeout
    started.start()
    _watch.append(started)


def stop() -> None:
    """End the watch, if there is one."""
    while _watch:
        _watch.pop().stop()
