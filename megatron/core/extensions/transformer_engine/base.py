"""What all of Transformer Engine's modules share here: how its classes come in, and what they cannot do."""

from functools import cache
from types import ModuleType, new_class
from typing import Any

import torch

from megatron.core import device
from megatron.core.broken_rule import config_sentence
from megatron.core.optional_imports import available, require
from megatron.core.transformer.transformer_engine_rules import transformer_engine_problems
from megatron.core.utils import is_te_min_version

HAVE_TE = available("transformer_engine")
OLDEST = "2.4"


@cache
def te_pytorch(what: str) -> ModuleType:
    """The package transformer_engine.pytorch, for `what`. Raises ValueError where it is missing (MissingPackageError) or too old."""
    module = require("transformer_engine.pytorch", f"{what} (--transformer-impl transformer_engine; local does without)")
    if not is_te_min_version(OLDEST):
        raise ValueError(f"{what} needs Transformer Engine {OLDEST} or newer: pip install 'transformer_engine[pytorch]>={OLDEST}'")
    return module


class TEModule(torch.nn.Module):
    """A module that becomes a subclass of Transformer Engine's class of the name `te_class` when it is made: until then, this class can be
    imported, derived from and named in a spec without the package.

    An object of a class C(TEModule) is of a class made once for C, whose bases are C and Transformer Engine's class; so C's
    `super().__init__(...)` and `super().forward(...)` are Transformer Engine's.
    """

    te_class = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(_joined(cls, cls._te_class_for(*args, **kwargs)))  # type: ignore[arg-type]

    def set_extra_state(self, state: Any) -> None:
        """Nothing: what is kept of FP8 are the linears' scales."""

    @property
    def keeps_scales(self) -> bool:
        """Whether there is state of FP8 to take back from a checkpoint."""
        return False

    @classmethod
    def _te_class_for(cls, *args: Any, **kwargs: Any) -> str:
        """Name of the class for an object with these arguments."""
        return cls.te_class


@cache
def _joined(cls: type, te_class: str) -> type:
    base = getattr(te_pytorch(cls.__name__), te_class)
    if issubclass(cls, base):  # copies are made of the joined class itself
        return cls
    return new_class(cls.__name__, (cls, base), exec_body=lambda names: names.update(__module__=cls.__module__))


def refuse_unsupported(config: Any) -> None:
    """Raise ValueError with all that `config` asks for and this backend cannot do."""
    found = [config_sentence(config, broken) for broken in transformer_engine_problems(config, config.num_moe_experts)]
    if found:
        raise ValueError("transformer_impl transformer_engine: " + "; ".join(found))


def where_parameters_live(config: Any) -> torch.device:
    return torch.device("cpu") if config.use_cpu_initialization else device.current_device()


def left_unset(tensor: torch.Tensor) -> torch.Tensor:
    """Transformer Engine's init_method: `declare` draws the values, the same for every backend."""
    return tensor
