"""Every optional package, in one place: is it there, and what to say when it is not.

Nothing else in the tree guards an import. Imports no package by itself.
"""

import importlib
import importlib.util
from functools import cache
from types import ModuleType

# import name -> what to type to have it
INSTALL_COMMAND = {
    "deep_ep": "build it from its sources, https://github.com/deepseek-ai/DeepEP",
    "flash_attn_interface": "build it from its sources, https://github.com/Dao-AILab/flash-attention, folder hopper",
    "fsspec": "pip install fsspec",
    "huggingface_hub": "pip install huggingface_hub",
    "jinja2": "pip install jinja2",
    "matplotlib": "pip install matplotlib",
    "nltk": "pip install nltk",
    "regex": "pip install regex",
    "safetensors": "pip install safetensors",
    "sentencepiece": "pip install sentencepiece",
    "tensorboard": "pip install tensorboard",
    "tiktoken": "pip install tiktoken",
    "tokenizers": "pip install tokenizers",
    "transformer_engine": "pip install 'transformer_engine[pytorch]>=2.4'",
    "transformers": "pip install transformers",
    "triton": "pip install triton (Linux with an NVIDIA GPU)",
    "wandb": "pip install wandb",
    "yaml": "pip install pyyaml",
    "zstandard": "pip install zstandard",
}


class MissingPackageError(ValueError):
    """An option needs a package that is not installed."""


@cache
def available(package: str) -> bool:
    """Whether `package` can be imported, found out without importing it."""
    assert package.partition(".")[0] in INSTALL_COMMAND, f"{package} is not in the table of optional packages"
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def require(package: str, purpose: str) -> ModuleType:
    """Import `package`, or say what needs it and how to install it.

    Raises MissingPackageError (a ValueError): "`purpose` needs the package X, which is not installed: pip install X".
    """
    root = package.partition(".")[0]
    if not available(root):
        raise MissingPackageError(f"{purpose} needs the package {root}, which is not installed: {INSTALL_COMMAND[root]}")
    return importlib.import_module(package)
