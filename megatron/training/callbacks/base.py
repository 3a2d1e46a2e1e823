"""Callbacks: objects whose methods the loop calls at phase boundaries, in the order of their list."""

from megatron.training.train_step import StepRecord, TrainingRun


class Callback:
    """Every method may be left out. A callback that sets `run.stop_reason` ends training after the current boundary."""

    def on_train_start(self, run: TrainingRun) -> None:
        """Before the first step; the model is loaded."""

    def on_step_end(self, run: TrainingRun, record: StepRecord) -> None:
        """After each step's update."""

    def on_evaluation_end(self, run: TrainingRun, set_name: str, losses: dict[str, float]) -> None:
        """After each set that was evaluated, on every rank: mean loss per name over all ranks."""

    def on_train_end(self, run: TrainingRun) -> None:
        """After the last step, however training ended short of an exception."""

    def on_run_complete(self, run: TrainingRun) -> None:
        """After the last iteration of the whole run; not when it stopped early."""

    def close(self) -> None:
        """Let go of files and handlers, also after an exception."""
