"""What a long run says about itself while it goes on."""

import sys
import time

from megatron.core.datasets.preparation.records import EncodedBatch
from megatron.core.datasets.preparation.text_input import Batch

LEAST_SECONDS = 1.0  # between two lines


class Progress:
    """A line on stderr every `interval` documents, but at most one a second: documents, MB/s, tokens/s, and the time that is left.

    total_bytes  of all input, as it lies on disk; 0 when nobody knows
    bytes_before, documents_before   of it that an earlier run did: rates and time left count this run alone
    """

    def __init__(self, interval: int, total_bytes: int, bytes_before: int = 0, documents_before: int = 0) -> None:
        self.interval, self.total_bytes = interval, total_bytes
        self.bytes_before, self.documents_before = bytes_before, documents_before
        self.started = time.perf_counter()
        self.last_line = self.started - LEAST_SECONDS
        self.documents = self.text_bytes = self.tokens = 0
        self.next_line = interval

    def add(self, batch: Batch, encoded: EncodedBatch) -> None:
        """Count a batch, and say so where a line is due."""
        self.documents += len(encoded.keys[0].sequences)
        self.tokens += sum(len(key.tokens) for key in encoded.keys)
        self.text_bytes += len(batch.text)
        now = time.perf_counter()
        if self.documents >= self.next_line and now >= self.last_line + LEAST_SECONDS:
            self.next_line = self.documents - self.documents % self.interval + self.interval
            self.last_line = now
            self.say(self._what_is_left(batch.bytes_read, now - self.started))

    def _what_is_left(self, bytes_read: int, seconds: float) -> str:
        if not self.total_bytes:
            return f"{bytes_read / 1e6:.0f} MB read" if bytes_read else f"{self.text_bytes / 1e6:.0f} MB of text so far"
        share = bytes_read / self.total_bytes
        left = int(seconds * max(self.total_bytes - bytes_read, 0) / max(bytes_read - self.bytes_before, 1))
        return f"{100 * min(share, 1):.0f}%, ETA {left // 3600}:{left // 60 % 60:02}:{left % 60:02}"

    def rates(self) -> str:
        """Documents, megabytes of JSON lines and tokens per second since the start."""
        seconds = max(time.perf_counter() - self.started, 1e-9)
        return f"{self.documents / seconds:.0f} docs/s, {self.text_bytes / seconds / 1e6:.1f} MB/s, {self.tokens / seconds:.0f} tokens/s"

    def documents_per_second(self) -> float:
        return self.documents / max(time.perf_counter() - self.started, 1e-9)

    def say(self, ending: str) -> None:
        documents = self.documents_before + self.documents
        print(f"processed {documents} documents ({self.rates()}), {ending}", file=sys.stderr, flush=True)


def counted(number: int, noun: str) -> str:
    """`1 record`, `2,000 records`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
