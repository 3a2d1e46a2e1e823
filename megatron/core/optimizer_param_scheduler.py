"""Learning rate and weight decay as functions of consumed samples.

Timing: step(0) before training, then step(samples of the batch) after each update, so the value that is set (and logged) after step N
is the one that step N + 1 uses, and the first step of a warm-up runs at `init_lr`.

With t consumed samples, W warm-up samples, D decay samples (counted from 0, warm-up included):
  t <= W: init + (max - init) * t / W;  t > D: min;  between them r = (t - W) / (D - W) and
  linear: 1 - r;  cosine: (1 + cos(pi r)) / 2, both as the fraction of max - min that is left;
  inverse-square-root: max(min, max * sqrt(max(W, 1) / max(t, 1)));  constant: max, whatever t.
  WSD (warm up, stay, decay): max until D - A, then r = (t - (D - A)) / A and
  linear: 1 - r;  cosine: (1 + cos(pi r)) / 2;  exponential: 2 * 0.5^r - 1;  minus_sqrt: 1 - sqrt(r).
"""

import logging
import math
from typing import Any, Protocol

logger = logging.getLogger(__name__)

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
WD_INCR_STYLES = ("constant", "linear", "cosine")

# spellings in older checkpoints
_OLD_KEYS = {
    "max_lr": ("start_lr",),
    "lr_warmup_steps": ("warmup_iter", "warmup_steps"),
    "lr_decay_steps": ("end_iter", "decay_steps"),
    "lr_decay_style": ("decay_style",),
    "num_steps": ("num_iters",),
}
_LR_KEYS = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style")
_WD_KEYS = ("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style")


class HasParamGroups(Protocol):
    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


def _cosine_fraction(ratio: float) -> float:
    return 0.5 * (math.cos(math.pi * ratio) + 1.0)


_WSD_FRACTION = {
    "linear": lambda r: 1.0 - r,
    "cosine": _cosine_fraction,
    "exponential": lambda r: 2.0 * 0.5**r - 1.0,
    "minus_sqrt": lambda r: 1.0 - math.sqrt(r),
}


class OptimizerParamScheduler:
    """Sets `lr` and `weight_decay` of every parameter group (formulas at the top of this file).

    All `*_steps` count samples. A group may carry `max_lr` and `min_lr` of its own (decoupled learning rate), and `lr_mult`, `wd_mult`.

    Args:
        optimizer: anything with `param_groups`.
        use_checkpoint_opt_param_scheduler: load_state_dict takes the checkpoint's schedule, whatever was given here.
        override_opt_param_scheduler: load_state_dict keeps the schedule given here and takes only the position.
    Raises ValueError for a schedule that makes no sense.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: int,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool | None = True,
        override_opt_param_scheduler: bool | None = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.init_lr, self.max_lr, self.min_lr = init_lr, max_lr, min_lr
        self.lr_warmup_steps, self.lr_decay_steps, self.lr_decay_style = lr_warmup_steps, lr_decay_steps, lr_decay_style
        self.wsd_decay_steps, self.lr_wsd_decay_style = wsd_decay_steps, lr_wsd_decay_style
        self.start_wd, self.end_wd, self.wd_incr_steps, self.wd_incr_style = start_wd, end_wd, wd_incr_steps, wd_incr_style
        self.use_checkpoint = bool(use_checkpoint_opt_param_scheduler)
        self.override = bool(override_opt_param_scheduler)
        self.num_steps = 0
        problems = self._problems()
        if problems:
            raise ValueError("\n".join(problems))
        self.step(0)

    def _problems(self) -> list[str]:
        found = []
        if self.min_lr < 0 or self.max_lr < self.min_lr:
            found.append(f"learning rates min {self.min_lr}, max {self.max_lr}: 0 <= min <= max must hold")
        if self.init_lr > self.max_lr:
            found.append(f"warm-up starts at learning rate {self.init_lr}, above the maximum {self.max_lr}: lower --lr-warmup-init")
        if self.lr_decay_style not in LR_DECAY_STYLES:
            found.append(f"learning rate decay style {self.lr_decay_style!r} is not one of {', '.join(LR_DECAY_STYLES)}")
        if self.lr_decay_steps <= 0:
            found.append(f"the learning rate decays over {self.lr_decay_steps} samples: it must be more than 0")
        if not 0 <= self.lr_warmup_steps < max(self.lr_decay_steps, 1):
            found.append(
                f"warm-up of {self.lr_warmup_steps} samples does not end before the decay at {self.lr_decay_steps} samples "
                "(counted from the start of training): shorten the warm-up or lengthen the decay"
            )
        if self.lr_decay_style == "WSD":
            if self.wsd_decay_steps is None or not 0 < self.wsd_decay_steps <= self.lr_decay_steps:
                found.append(f"WSD decays over its last {self.wsd_decay_steps} samples: more than 0, at most {self.lr_decay_steps}")
            if self.lr_wsd_decay_style not in WSD_DECAY_STYLES:
                found.append(f"WSD decay style {self.lr_wsd_decay_style!r} is not one of {', '.join(WSD_DECAY_STYLES)}")
        if self.wd_incr_style not in WD_INCR_STYLES:
            found.append(f"weight decay increment style {self.wd_incr_style!r} is not one of {', '.join(WD_INCR_STYLES)}")
        if not 0 <= self.start_wd <= self.end_wd:
            found.append(f"weight decay from {self.start_wd} to {self.end_wd}: 0 <= start <= end must hold")
        if self.wd_incr_style == "constant" and self.start_wd != self.end_wd:
            found.append(f"constant weight decay, but start {self.start_wd} and end {self.end_wd} differ: use linear or cosine")
        if self.wd_incr_style != "constant" and self.wd_incr_steps <= 0:
            found.append(f"weight decay rises over {self.wd_incr_steps} samples: it must be more than 0")
        return found

    def get_wd(self, param_group: dict[str, Any] | None = None) -> float:
        """Weight decay for the next step, before the group's `wd_mult`."""
        group = param_group or {}
        start, end = group.get("start_wd", self.start_wd), group.get("end_wd", self.end_wd)
        if self.wd_incr_style == "constant" or self.num_steps > self.wd_incr_steps:
            return end
        ratio = self.num_steps / self.wd_incr_steps
        fraction = ratio if self.wd_incr_style == "linear" else 1.0 - _cosine_fraction(ratio)
        return start + fraction * (end - start)

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Learning rate of a group for the next step, before its `lr_mult`."""
        max_lr = param_group.get("max_lr")
        min_lr = param_group.get("min_lr")
        max_lr = self.max_lr if max_lr is None else max_lr
        min_lr = self.min_lr if min_lr is None else min_lr
        steps, warmup = self.num_steps, self.lr_warmup_steps
        if warmup > 0 and steps <= warmup:
            return self.init_lr + (max_lr - self.init_lr) * steps / warmup
        if self.lr_decay_style == "constant":
            return max_lr
        if steps > self.lr_decay_steps:
            return min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(min_lr, max_lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(steps, 1)))
        return min_lr + self._fraction_left() * (max_lr - min_lr)

    def _fraction_left(self) -> float:
        """What is left of max - min, between warm-up and the end of the decay."""
        if self.lr_decay_style == "WSD":
            assert self.wsd_decay_steps is not None and self.lr_wsd_decay_style is not None
            into = self.num_steps - (self.lr_decay_steps - self.wsd_decay_steps)
            return 1.0 if into <= 0 else _WSD_FRACTION[self.lr_wsd_decay_style](into / self.wsd_decay_steps)
        ratio = (self.num_steps - self.lr_warmup_steps) / (self.lr_decay_steps - self.lr_warmup_steps)
        return 1.0 - ratio if self.lr_decay_style == "linear" else _cosine_fraction(ratio)

    def step(self, increment: int) -> None:
        """Go on by `increment` samples and set every group's values."""
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group) * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.get_wd(group) * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        """The schedule and its position, in plain values."""
        return {key: getattr(self, key) for key in (*_LR_KEYS, "num_steps", *_WD_KEYS)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the position, and the schedule by the rule chosen at construction; groups have their values when this returns.

        Raises ValueError when the two schedules differ and neither rule was chosen.
        """
        if self.override and self.use_checkpoint:
            raise ValueError("--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other: keep one")
        saved = dict(state_dict)
        for key, old_spellings in _OLD_KEYS.items():
            for old in old_spellings:
                if old in saved:
                    saved.setdefault(key, saved[old])
        schedule = {key: saved[key] for key in (*_LR_KEYS, *_WD_KEYS) if key in saved}
        if saved.get("lr_decay_style") == self.lr_decay_style == "constant":
            schedule.pop("lr_decay_steps", None)  # a length that nothing reads
        if saved.get("wd_incr_style") == self.wd_incr_style == "constant":
            schedule.pop("wd_incr_steps", None)
        differing = {key: value for key, value in schedule.items() if getattr(self, key) != value}
        if differing and not (self.override or self.use_checkpoint):
            listed = "; ".join(f"{key} is {getattr(self, key)} here and {value} there" for key, value in differing.items())
            raise ValueError(
                f"the checkpoint's learning-rate and weight-decay schedule is not the one given: {listed} (steps count samples). Choose: "
                "--use-checkpoint-opt-param-scheduler continues the checkpoint's schedule; "
                "--override-opt-param-scheduler continues with the one given; "
                "or give the checkpoint's values again (with a longer training, set --lr-decay-iters or --lr-decay-samples to the old end)"
            )
        if self.use_checkpoint:
            for key, value in schedule.items():
                setattr(self, key, value)
        if differing:
            logger.info("schedule of the %s: %s", "checkpoint" if self.use_checkpoint else "command line", ", ".join(differing))
        self.num_steps = saved["num_steps"]
        self.step(0)
