"""Which samples a run's global sample numbers stand for: kept in its checkpoints, so that it may ask for other sizes or blends later.

docs/data_order.md says what stays and what may change.
"""

import argparse
from collections.abc import Mapping
from typing import Any

VERSION = 1
# Settings that cut or shuffle the tokens themselves: with another value sample numbers stand for other samples.
SETTINGS = ("seed", "seq_length", "split", "dataloader_type", "separate_last_epoch_below")


class DataOrder:
    """The plans of training and validation (core.datasets.sample_plan), as they were saved and, once `attach`ed, as they are now.

    state  {"version": 1, "settings": {name: value}, "train": [plan], "valid": [plan, ...]} with plans as of SamplePlan.state_dict
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state)
        self.datasets: dict[str, list[Any]] = {}

    @classmethod
    def of_this_run(cls, args: argparse.Namespace) -> "DataOrder":
        """What a run begins with."""
        return cls({"version": VERSION, "settings": _settings(args), "train": [], "valid": []})

    def plans_for(self, args: argparse.Namespace) -> tuple[dict[str, list[dict[str, Any]]] | None, str | None]:
        """(the plans to go on from, None where they do not hold for these flags; why they do not, in one sentence).

        Sizes and blends may differ.
        """
        if self.state.get("version") != VERSION:
            return None, f"the order of samples in the checkpoint is of version {self.state.get('version')}, {VERSION} is known"
        saved, now = self.state["settings"], _settings(args)
        changed = [name for name in now if saved.get(name) != now[name]]
        if changed:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
            return None, f"with another {names} sample numbers stand for other samples: the order of data begins anew at this position"
        return {"train": self.state["train"], "valid": self.state["valid"]}, None

    def attach(self, train: Any, valid: Any) -> None:
        """From now on save the plans of these datasets. Those without a plan (other programs' classes) save none."""
        sets = list(valid) if isinstance(valid, list | tuple) else [valid]
        self.datasets = {name: [s for s in found if hasattr(s, "sample_plan")] for name, found in (("train", [train]), ("valid", sets))}

    def state_dict(self, consumed_train: int, consumed_valid: int) -> dict[str, Any]:
        """What to save at this position: plain numbers, texts, lists and dicts."""
        positions = {"train": consumed_train, "valid": consumed_valid}
        plans = {name: [self._plan_state(item, positions[name]) for item in found] for name, found in self.datasets.items()}
        return {**self.state, **plans}

    def _plan_state(self, dataset: Any, position: int) -> dict[str, Any]:
        plan = dataset.sample_plan
        if self.state["settings"]["dataloader_type"] == "cyclic":  # it shuffles the dataset's samples: the plan stands still
            position = 0
        picks = getattr(dataset, "dataset_index", None)  # what the current segment draws, of which a single corpus needs no list
        if picks is not None and len(picks) < position - plan.current.start:
            picks = None  # validation that was asked for more than it has
        return plan.state_dict(position, picks)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    # a random order runs over all samples of the dataset, so that with another blend every number is another sample
    names = (*SETTINGS, *(("data_path", "train_data_path") if args.dataloader_type == "cyclic" else ()))
    return {name: getattr(args, name) for name in names}
