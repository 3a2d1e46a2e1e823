"""What scripts of others fetch globally: args, tokenizer, timers, writers. Set once at start-up; the loop itself reads none of it."""

from typing import Any

_VALUES: dict[str, Any] = {}


def _get(name: str) -> Any:
    if name not in _VALUES:
        raise RuntimeError(f"{name} is not set yet: call initialize_megatron() (or pretrain(), which does) first")
    return _VALUES[name]


def set_global(name: str, value: Any) -> None:
    _VALUES[name] = value


def unset_global_variables() -> None:
    _VALUES.clear()


def get_args() -> Any:
    return _get("args")


def set_args(args: Any) -> None:
    set_global("args", args)


def get_tokenizer() -> Any:
    return _get("tokenizer")


def get_timers() -> Any:
    return _get("timers")


def get_tensorboard_writer() -> Any:
    """The SummaryWriter of the rank that logs, None elsewhere."""
    return _VALUES.get("tensorboard_writer")


def get_wandb_writer() -> Any:
    return _VALUES.get("wandb_writer")
