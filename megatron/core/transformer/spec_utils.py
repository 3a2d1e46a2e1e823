"""A layer's parts as data: which class (or function) plays each part, with which arguments."""

import importlib
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any


@dataclass
class ModuleSpec:
    """`module`: a class, a function, or its path as (module, name). `params`: keyword arguments. `submodules`: the parts' own specs."""

    module: Any
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None
    metainfo: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return build_module(self, *args, **kwargs)


def import_module(module_path: tuple[str, str]) -> Any:
    """The object named `module_path[1]` of the module `module_path[0]`. Raises ImportError naming both."""
    where, name = module_path
    try:
        return getattr(importlib.import_module(where), name)
    except AttributeError:
        raise ImportError(f"{where} has no {name}") from None


def get_module(spec_or_module: Any, **additional_kwargs: Any) -> Any:
    """The class or function that a spec names, without building it."""
    if not isinstance(spec_or_module, ModuleSpec):
        return spec_or_module
    return import_module(spec_or_module.module) if isinstance(spec_or_module.module, tuple) else spec_or_module.module


def build_module(spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    """Build what the spec says with `args` and `kwargs` (which win over the spec's params). A function is returned as it is.

    An error while building names the class.
    """
    module = get_module(spec_or_module)
    if isinstance(module, FunctionType):
        return module
    if isinstance(spec_or_module, ModuleSpec):
        kwargs = {**spec_or_module.params, **kwargs}
        if spec_or_module.submodules is not None:
            kwargs["submodules"] = spec_or_module.submodules
    try:
        return module(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{error} (while building {getattr(module, '__name__', module)})").with_traceback(error.__traceback__) from None
