"""What the benchmarks' command lines have in common: a wrong one ends the program before anything is measured."""

import argparse
import signal
import sys
import tempfile
from pathlib import Path


def positive(text: str) -> float:
    """A type of arguments."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return number


def count(text: str) -> int:
    """A type of arguments."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def end_on_sigterm() -> None:
    """A request to end unwinds the program as Ctrl-C does, so that what it started ends and what it found is printed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def check_there_are_gpus(parser: argparse.ArgumentParser, needed: int) -> None:
    """Ends the program, in one line, where this host has fewer."""
    import torch

    if torch.cuda.device_count() < needed:
        parser.error(f"this host has {torch.cuda.device_count()} GPUs, and {needed} are needed")


def check_can_be_written(parser: argparse.ArgumentParser, path: str | Path | None) -> None:
    """Ends the program before anything is measured."""
    if path is None:
        return
    file = Path(path).absolute()
    if not file.parent.is_dir():
        parser.error(f"--json {path}: there is no folder {file.parent}")
    if file.is_dir():
        parser.error(f"--json {path}: is a folder; give a file (works: {file / 'numbers.json'})")
    try:
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        parser.error(f"--json {path}: {file.parent} cannot be written to: {error.strerror}")
