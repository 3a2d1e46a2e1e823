"""The two-GPU layouts, each through the trainer, one table: `python tools/benchmark/two_gpus.py`.

Configurations (train.py) and global batches are those that docs/performance.md quotes the peer with.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from command_line import check_can_be_written, check_there_are_gpus, count, end_on_sigterm
from train import RunFailed, run

# name -> (extra flags, the peer's ms per iteration on two H200s)
LAYOUTS = {
    "DP2, distributed optimizer, both overlaps": (
        "--global-batch-size 8 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        943,
    ),
    "TP2 + sequence parallel": ("--global-batch-size 8 --tensor-model-parallel-size 2 --sequence-parallel", 1045),
    "TP2 + sequence parallel, overlapped": (
        "--global-batch-size 8 --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
        1031,
    ),
    "PP2": ("--global-batch-size 16 --pipeline-model-parallel-size 2", 2328),
    "PP2, 2 layers a virtual stage": (
        "--global-batch-size 16 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
        2274,
    ),
    "PP2, zero-bubble": ("--global-batch-size 16 --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble", 2328),
    "CP2 ring, seq 16384": (
        "--global-batch-size 4 --context-parallel-size 2 --seq-length 16384 --max-position-embeddings 16384 --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather",
        1105,
    ),
    "CP2 ring by copies, seq 16384": (
        "--global-batch-size 4 --context-parallel-size 2 --seq-length 16384 --max-position-embeddings 16384 --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather --cp-comm-overlap",
        1105,
    ),
    "moe8x EP2": (
        "--global-batch-size 16 --expert-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        700,
    ),
}
CONFIGURATION = {"moe8x EP2": "moe8x"}  # the others: llama8L


def main() -> int:
    """The exit code: 1 where a layout failed; the table has the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=count, default=14)
    parser.add_argument("--only", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), metavar="LAYOUT", help=" | ".join(LAYOUTS))
    parser.add_argument("--json", help="write the numbers to this file too")
    options = parser.parse_args()
    check_there_are_gpus(parser, 2)
    check_can_be_written(parser, options.json)
    end_on_sigterm()
    rows: dict[str, dict] = {}
    failed: dict[str, RunFailed] = {}
    for name in options.only:
        flags, peer = LAYOUTS[name]
        try:
            rows[name] = run(CONFIGURATION.get(name, "llama8L"), options.iterations, 2, flags.split())
        except RunFailed as error:
            failed[name] = error
            continue
        rows[name]["peer_ms"] = peer
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1))
    print(f"{'layout':45} {'ms':>7} {'TFLOP/s':>8} {'GiB':>6} {'peer ms':>8} {'time / peer':>11}")
    for name, row in rows.items():
        ratio = row["elapsed_ms"] / row["peer_ms"]
        print(f"{name:45} {row['elapsed_ms']:7.0f} {row['tflops']:8.1f} {row['peak_memory_gib']:6.1f} {row['peer_ms']:8d} {ratio:11.2f}")
    for name, why in failed.items():
        print(f"{name:45} failed: {why}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
