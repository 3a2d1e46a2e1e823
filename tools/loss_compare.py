"""Do two ways to run a recipe train the same model? Losses and gradient norms step by step, and the first tensor that differs.

    python tools/loss_compare.py --common "<the recipe>" --b "--tensor-model-parallel-size 2 --sequence-parallel" --processes-b 2
    python tools/loss_compare.py --common "<the recipe>" --commit-a v1 --commit-b HEAD --tolerance 0
    python tools/loss_compare.py --metrics-a one.jsonl --metrics-b other.jsonl

The first two run `--script` with the flags of --common and of --a or --b, from this tree or from a commit's, for at most --steps steps; the
third reads what runs wrote to --metrics-file. Tensors come from checkpoints, so that any two commits can be compared. A first step with a
learning rate of 0 leaves the initial weights, and (1 - beta1) times the first gradients, clipped, as Adam's mean: both are compared, in
the order in which a training computes them, weights from the embedding on, gradients from the output back. The tensors of later steps
are judged with --tolerance 0 only, and named where losses differ: Adam moves a weight whose gradient is zero but for rounding as far as any
other, so that correct runs drift apart there.

Exit code: 0 equal, 1 different, 2 a run failed or the command line is wrong.
"""

import argparse
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

LOGGED_LINES = 30  # of a run that failed
SHOWN_ROWS = 40  # longer tables are cut
# Of a layer, in the order in which it computes.
PARTS = (
    "linear_qkv.layer_norm",
    "input_layernorm",
    "linear_qkv",
    "q_layernorm",
    "k_layernorm",
    "self_attention",
    "mlp.linear_fc1.layer_norm",
    "pre_mlp_layernorm",
    "router",
    "linear_fc1",
    "linear_fc2",
)
PLACES = ("embedding.word", "embedding", "decoder.layers", "decoder.final", "output_layer")
MEAN_OF_GRADIENTS = re.compile(r"optimizer\.state\.(?:exp_avg|momentum_buffer)\.")
VOCABULARY = ("word_embeddings.weight", "output_layer.weight")

Rows = dict[int, dict[str, Any]]  # iteration -> what was logged
Name = tuple[str, int | None]  # checkpoint key, layer


class RunError(Exception):
    """A run that cannot be compared, in words for the user."""


@dataclass
class Side:
    """One of the two: where its code is, and how it is started."""

    name: str
    root: Path
    processes: int
    common: str
    own: str
    folder: Path
    script: str

    @property
    def flags(self) -> list[str]:
        return shlex.split(self.common) + shlex.split(self.own)

    def train(self, what: str, *more: str) -> Path:
        """Run the recipe with `more` flags; returns the folder with its checkpoints and metrics.jsonl. Raises RunError."""
        out = self.folder / what
        out.mkdir(parents=True)
        script = self.root / self.script
        if not script.exists():
            raise RunError(f"--script {self.script}: there is none in the tree of run {self.name}")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.processes)] if self.processes > 1 else []
        extra = ["--log-interval", "1", "--metrics-file", str(out / "metrics.jsonl"), "--save", str(out), "--save-interval", "1", *more]
        print(f"run {self.name}, {what}: {self.processes} x {self.script} {self.own or '(no flags of its own)'}", flush=True)
        path = os.pathsep.join(filter(None, (str(self.root), os.environ.get("PYTHONPATH"))))
        with open(out / "output.txt", "w") as log:
            command = [sys.executable, *launcher, str(script), *self.flags, *extra]
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path}).returncode
        if code:
            last = (out / "output.txt").read_text(errors="replace").splitlines()[-LOGGED_LINES:]
            raise RunError(f"run {self.name} ended with exit code {code}; the last lines that it printed:\n" + "\n".join(last))
        return out


# --- what was logged ---


def read_rows(path: Path) -> Rows:
    """The training steps in a --metrics-file; of a step that was logged twice (a run that went on) the last. Raises RunError."""
    if not path.exists():
        raise RunError(f"{path}: no such file; it is what a run with --metrics-file {path} writes")
    rows: Rows = {}
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(text)
            if "evaluation" not in row:
                rows[row["iteration"]] = row
        except (ValueError, KeyError, TypeError):
            raise RunError(f"{path}, line {number}: not a line of a metrics file (JSON with an iteration): {text[:60]!r}") from None
    if not rows:
        raise RunError(f"{path} holds no training step")
    return rows


def relative(left: Any, right: Any) -> float:
    """|left - right| / the larger; infinite when one is not there or not finite."""
    if left is None or right is None or not (math.isfinite(left) and math.isfinite(right)):
        return math.inf
    scale = max(abs(left), abs(right))
    return abs(left - right) / scale if scale else 0.0


def columns(left: Rows, right: Rows) -> list[str]:
    """What is compared: losses, and the gradient norm."""
    names = dict.fromkeys(name for rows in (left, right) for row in rows.values() for name in row)
    return sorted((name for name in names if name.endswith("loss")), key=lambda name: name != "lm_loss") + ["grad_norm"]


def print_table(left: Rows, right: Rows, names: list[str], tolerance: float) -> None:
    """Every step, or of many steps the first, the last, and those around the first that differs; `<` marks what is beyond tolerance."""
    steps = sorted(left.keys() | right.keys())
    first = next((i for i, step in enumerate(steps) if differing(left, right, names, tolerance, step)), 0)
    few = len(steps) <= SHOWN_ROWS
    shown = [i for i in range(len(steps)) if few or i < 10 or i >= len(steps) - 5 or abs(i - first) <= 5]
    header = "  step" + "".join(f"{name + ' a':>18}{name + ' b':>18}{'relative':>10} " for name in names)
    print(header.rstrip())
    before = -1
    for i in shown:
        if i != before + 1:
            print("   ...")
        before, step = i, steps[i]
        line = f"{step:6}"
        for name in names:
            a, b = (rows.get(step, {}).get(name) for rows in (left, right))
            apart = relative(a, b)
            numbers = "".join(f"{'-' if value is None else format(value, '.9g'):>18}" for value in (a, b))
            line += f"{numbers}{apart:10.1e}{' ' if apart <= tolerance else '<'}"
        print(line.rstrip())


def differing(left: Rows, right: Rows, names: list[str], tolerance: float, step: int) -> list[str]:
    a, b = left.get(step, {}), right.get(step, {})
    return [name for name in names if not (name not in a and name not in b) and not relative(a.get(name), b.get(name)) <= tolerance]


def compare_rows(left: Rows, right: Rows, tolerance: float) -> bool:
    """Print the table and what it says; whether all is within tolerance."""
    names = columns(left, right)
    print_table(left, right, names, tolerance)
    steps = sorted(left.keys() | right.keys())
    for step in steps:
        if found := differing(left, right, names, tolerance, step):
            texts = []
            for name in found:
                a, b = left.get(step, {}).get(name), right.get(step, {}).get(name)
                texts.append(f"{name} {a} and {b}, {relative(a, b):.1e} apart")
            print(f"first difference beyond {tolerance:g}: step {step}, " + "; ".join(texts))
            return False
    largest = max(relative(left[step].get(name), right[step].get(name)) for step in steps for name in names if name in left[step])
    print(f"losses and gradient norms of {len(steps)} steps are equal within {tolerance:g}; the largest difference is {largest:.1e}")
    return True


# --- tensors ---


def load_tensors(folder: Path, step: int | None = None) -> dict[str, Any]:
    """Weights and means of gradients in a checkpoint of `folder` (the last one), whole."""
    from megatron.core.dist_checkpointing import load_plain_tensors

    found = sorted(path for path in folder.glob("iter_*") if path.suffix == "")
    if step is not None:
        found = [path for path in found if path.name == f"iter_{step:07d}"]
    if not found:
        raise RunError(f"{folder} holds no checkpoint" + ("" if step is None else f" of step {step}"))
    return load_plain_tensors(found[-1])


def weights(tensors: dict[str, Any]) -> dict[Name, Any]:
    return by_layer({key: value for key, value in tensors.items() if "optimizer." not in key and "_extra_state" not in key})


def gradient_means(tensors: dict[str, Any]) -> dict[Name, Any]:
    """Adam's first moments, or SGD's momentum, under their weights' keys."""
    return by_layer({key[match.end() :]: value for key, value in tensors.items() if (match := MEAN_OF_GRADIENTS.search(key))})


def by_layer(tensors: dict[str, Any]) -> dict[Name, Any]:
    """Floating-point tensors, those of stacked layers one by one, in the order of the model."""
    found: dict[Name, Any] = {}
    for key, value in tensors.items():
        if not value.is_floating_point():
            continue
        inside = key.partition("decoder.layers.")[2]
        number = inside.partition(".")[0]
        if not inside or not value.dim():
            found[key, None] = value
        elif number.isdigit():
            found[key, int(number)] = value
        else:
            found.update({(key, layer): part for layer, part in enumerate(value)})
    return dict(sorted(found.items(), key=lambda item: order(item[0])))


def order(name: Name) -> tuple:
    key, layer = name
    place = next((i for i, start in enumerate(PLACES) if key.startswith(start)), PLACES.index("decoder.layers"))
    part = next((i for i, text in enumerate(PARTS) if text in key), len(PARTS))
    return place, -1 if layer is None else layer, part, key


def first_difference(left: dict[Name, Any], right: dict[Name, Any], tolerance: float, backward: bool) -> str | None:
    """The first tensor that differs by more than tolerance times its largest element, in words; `backward`: from the end of the model."""
    import torch

    names = sorted(left.keys() | right.keys(), key=order, reverse=backward)
    for key, layer in names:
        what = key if layer is None else f"{key}, layer {layer} (counted from 0)"
        a, b = left.get((key, layer)), right.get((key, layer))
        if a is None or b is None:
            return f"{what}: only run {'a' if b is None else 'b'} has it"
        if a.shape != b.shape and key.endswith(VOCABULARY) and a.shape[1:] == b.shape[1:]:
            rows = min(len(a), len(b))  # the rest is padding, whose size depends on the tensor-parallel size
            a, b = a[:rows], b[:rows]
        if a.shape != b.shape:
            return f"{what}: of shape {tuple(a.shape)} in run a, {tuple(b.shape)} in run b"
        a, b = a.double(), b.double()
        apart = (a - b).abs().nan_to_num(nan=math.inf)
        scale = float(torch.maximum(a.abs().max(), b.abs().max()))
        largest = float(apart.max())
        if largest > 0 and not largest <= tolerance * scale:
            place = [int(i) for i in torch.unravel_index(apart.argmax(), apart.shape)]
            values = f"element {place}: {float(a[tuple(place)]):.9g} and {float(b[tuple(place)]):.9g}"
            return f"{what}: {largest / scale if scale else math.inf:.1e} apart relative to its largest element; {values}"
    return None


def steps_differ(one: Path, two: Path, steps: list[int], tolerance: float) -> str | None:
    """The first tensor that differs in the checkpoints that the runs wrote after each step."""
    for step in steps:
        a, b = load_tensors(one, step), load_tensors(two, step)
        looks: list[tuple[str, Callable, bool]] = [("optimizer's mean of gradients", gradient_means, True)]
        if tolerance == 0:
            looks.append(("weights", weights, False))
        for what, pick, backward in looks:
            if text := first_difference(pick(a), pick(b), tolerance, backward):
                return f"{what} after step {step}: {text}"
    return None


def start_differs(one: Path, two: Path, tolerance: float) -> str | None:
    """The same for a first step that did not move the weights."""
    a, b = load_tensors(one), load_tensors(two)
    if text := first_difference(weights(a), weights(b), tolerance, backward=False):
        return f"weights before the first step: {text}"
    if text := first_difference(gradient_means(a), gradient_means(b), tolerance, backward=True):
        return f"gradients of the first step: {text}"
    return None


def without_learning(flags: list[str]) -> list[str]:
    """What makes a step leave the weights alone."""
    more = ["--lr", "0", "--min-lr", "0", "--lr-warmup-init", "0", "--exit-interval", "1"]
    if "--decoupled-lr" in flags:
        more += ["--decoupled-lr", "0", "--decoupled-min-lr", "0"]
    if "--load" in flags and "--override-opt-param-scheduler" not in flags:
        more.append("--override-opt-param-scheduler")  # else the checkpoint's learning rate would hold
    return more


# --- the program ---


@contextmanager
def tree_of(commit: str | None, folder: Path) -> Iterator[Path]:
    """This tree, or the commit's in a git worktree that lives as long as the context. Raises RunError."""
    if commit is None:
        yield ROOT
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    made = subprocess.run([*git, "add", "--detach", str(folder), commit], capture_output=True, text=True)
    if made.returncode:
        raise RunError(f"commit {commit!r}: git made no worktree of it: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], capture_output=True)


def compare_runs(args: argparse.Namespace, folder: Path) -> bool:
    with ExitStack() as stack:
        sides = []
        for name in "ab":
            root = stack.enter_context(tree_of(getattr(args, f"commit_{name}"), folder / f"tree_{name}"))
            processes, own = getattr(args, f"processes_{name}"), getattr(args, name)
            sides.append(Side(name, root, processes, args.common, own, folder / name, args.script))
        one, two = (side.train("training", "--exit-interval", str(args.steps)) for side in sides)
        left, right = read_rows(one / "metrics.jsonl"), read_rows(two / "metrics.jsonl")
        equal = compare_rows(left, right, args.tolerance)
        still_one, still_two = (side.train("first step without learning", *without_learning(side.flags)) for side in sides)
        tensor = start_differs(still_one, still_two, args.tolerance)
        if tensor is None and not (equal and args.tolerance):
            tensor = steps_differ(one, two, sorted(left.keys() & right.keys()), args.tolerance)
        if tensor is not None:
            print(f"first tensor that differs beyond {args.tolerance:g}: {tensor}")
        elif equal:
            print("tensors are equal too: " + ("all" if args.tolerance == 0 else "initial weights, and gradients of the first step"))
        else:
            print(f"no tensor of the first step, and no later mean of gradients, differs beyond {args.tolerance:g}")
        return equal and tensor is None


def joined(words: list[str]) -> list[str]:
    """`--b --bf16` as `--b=--bf16`: argparse would take the flag of the run for one of ours."""
    found: list[str] = []
    for word in words:
        if found and found[-1] in ("--common", "--a", "--b"):
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    description, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--common", default="", help="flags of both runs, in one string")
    parser.add_argument("--script", default="pretrain_gpt.py", help="what is run, relative to the tree")
    for name in "ab":
        parser.add_argument(f"--{name}", default="", help=f"further flags of run {name}, in one string")
        parser.add_argument(f"--processes-{name}", type=int, default=1, help=f"processes of run {name} (default 1)")
        parser.add_argument(f"--commit-{name}", help=f"the commit that run {name} is made with; default: this tree as it is")
        parser.add_argument(f"--metrics-{name}", type=Path, help="compare this --metrics-file of a run that was made before")
    parser.add_argument("--steps", type=int, default=10, help="at most so many steps, each with a checkpoint (default 10)")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="relative; 0: to the bit (default 1e-5, for fp32)")
    parser.add_argument("--keep", type=Path, help="keep checkpoints, metrics and outputs in this new folder; default: a temporary one")
    args = parser.parse_args(joined(sys.argv[1:] if argv is None else argv))
    if (args.metrics_a is None) != (args.metrics_b is None):
        parser.error("--metrics-a and --metrics-b: give both, or neither")
    if args.metrics_a is None and not args.common and not args.a and not args.b:
        parser.error("nothing to run: give the recipe's flags with --common, or two files with --metrics-a and --metrics-b")
    if args.steps < 1 or args.processes_a < 1 or args.processes_b < 1:
        parser.error("--steps, --processes-a and --processes-b: at least 1")
    if not args.tolerance >= 0:
        parser.error(f"--tolerance {args.tolerance}: at least 0; 1e-5 suits fp32")
    if args.keep is not None and args.keep.exists() and any(args.keep.iterdir()):
        parser.error(f"--keep {args.keep}: not empty; give a new folder")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        if args.metrics_a is not None:
            equal = compare_rows(read_rows(args.metrics_a), read_rows(args.metrics_b), args.tolerance)
        else:
            with tempfile.TemporaryDirectory(prefix="loss_compare_") as folder:
                equal = compare_runs(args, args.keep.resolve() if args.keep else Path(folder))
    except RunError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 2
    print("EQUAL" if equal else "DIFFERENT")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
