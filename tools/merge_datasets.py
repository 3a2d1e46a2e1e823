#!/usr/bin/env python3
"""Several .bin/.idx pairs to one: all documents of the first, then all of the second, and so on.

Refused: ids of different types, different tokenizers (by the fingerprint in the .meta.json), damaged files, an output that is an input.
The merged pair gets its names when it is whole, and a .meta.json when all inputs have one. Constant memory; torch-free.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.datasets.preparation.interruption import Stopped, catch_stop_signals
from megatron.core.datasets.preparation.merging import find_pairs, merge
from megatron.core.datasets.preparation.prepare import say_on_stderr


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    inputs = "a folder, whose pairs are taken sorted by name; or prefixes of pairs, in the order given"
    parser.add_argument("--input", required=True, nargs="+", help=inputs)
    parser.add_argument("--output-prefix", required=True, help="path of the merged pair, without the suffix")
    parser.add_argument("--multimodal", action="store_true", help="the pairs store a mode for each sequence")
    args = parser.parse_args(argv)
    folder = Path(args.output_prefix).absolute().parent
    if not folder.is_dir():
        parser.error(f"--output-prefix {args.output_prefix}: the folder {folder} does not exist")
    return args


def main() -> int:
    args = parse_args()
    catch_stop_signals()
    try:
        counts = merge(find_pairs(args.input), args.output_prefix, args.multimodal, say_on_stderr)
    except (ValueError, OSError) as error:
        say_on_stderr(f"error: {error}")
        return 1
    except Stopped as error:
        say_on_stderr(f"error: stopped by {error}, nothing is written")
        return 1
    say_on_stderr(f"{args.output_prefix}: " + ", ".join(f"{number} {name}" for name, number in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
