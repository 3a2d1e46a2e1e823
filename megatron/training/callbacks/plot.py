"""At the end of a run, its curves as a picture."""

import math
from pathlib import Path

from megatron.core import optional_imports
from megatron.training.callbacks.interval_log import LogSink
from megatron.training.train_step import TrainingRun
from megatron.training.training_log import IntervalNumbers, StepNumbers

FILE_NAME = "training_curves.png"


class PlotCurves(LogSink):
    """Loss of training and validation, and the learning rate, of this start of the run: `training_curves.png` beside the checkpoints."""

    def __init__(self, folder: str, loss_name: str = "lm loss") -> None:
        self.path = Path(folder) / FILE_NAME
        self.loss_name = loss_name
        self.training: list[tuple[int, float, float]] = []  # iteration, loss, learning rate
        self.validation: dict[str, list[tuple[int, float]]] = {}

    def write(self, numbers: IntervalNumbers, steps: list[StepNumbers]) -> None:
        self.training.append((numbers.iteration, numbers.losses.get(self.loss_name, math.nan), numbers.learning_rate))

    def write_evaluation(self, run: TrainingRun, set_name: str, losses: dict[str, float]) -> None:
        if self.loss_name in losses:
            self.validation.setdefault(set_name, []).append((run.state.iteration, losses[self.loss_name]))

    def close(self) -> None:
        """Draw. Without matplotlib, or with fewer than two points, there is no picture."""
        if len(self.training) < 2 or not optional_imports.available("matplotlib"):
            return
        self.draw()
        print(f"  loss and learning rate are drawn in {self.path}", flush=True)

    def draw(self) -> None:
        matplotlib = optional_imports.require("matplotlib", "drawing the curves")
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        iterations, losses, rates = zip(*self.training, strict=True)
        figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained")
        top.plot(iterations, losses, color="tab:blue", linewidth=1.2, label="training")
        for number, (name, points) in enumerate(self.validation.items(), 1):
            look = {"color": f"C{number % 10}", "marker": "osD^vP*X"[number % 8], "markersize": 4, "linewidth": 1}
            top.plot(*zip(*points, strict=True), label=name, **look)
        top.set_ylabel(f"{self.loss_name} (nats per token)")
        top.grid(alpha=0.3)
        top.legend()
        bottom.plot(iterations, rates, color="tab:gray", linewidth=1.2)
        bottom.set_ylabel("learning rate")
        bottom.set_xlabel("iteration")
        bottom.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        bottom.grid(alpha=0.3)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp.png")
        try:
            figure.savefig(temporary, dpi=120)
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)
            plt.close(figure)
