"""No field of a configuration is silently without effect: each is read somewhere, or refused unless it is at its default."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import megatron.core
from megatron.core import model_parallel_config
from megatron.core.distributed import distributed_data_parallel_config
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import optimizer_config
from megatron.core.transformer import transformer_config

SHAPE = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
# configuration -> (its module, a value for each field that has to be given, what of its own fields is not built)
CONFIGS = {
    model_parallel_config.ModelParallelConfig: (model_parallel_config, {}, model_parallel_config.UNBUILT),
    transformer_config.TransformerConfig: (transformer_config, SHAPE, transformer_config.UNBUILT),
    transformer_config.MLATransformerConfig: (transformer_config, SHAPE, transformer_config.MLA_UNBUILT),
    optimizer_config.OptimizerConfig: (optimizer_config, {}, optimizer_config.UNBUILT),
    distributed_data_parallel_config.DistributedDataParallelConfig: (
        distributed_data_parallel_config,
        {},
        distributed_data_parallel_config.UNBUILT,
    ),
}
OTHER_VALUES = {bool: lambda value: not value, int: lambda value: value + 1, float: lambda value: value + 1.0}


def sources():
    """The text of megatron/core, less the configurations: what they say of a field is not a use of it."""
    files = Path(megatron.core.__file__).parent.rglob("*.py")
    names = {Path(str(module.__file__)).name for module, *_ in CONFIGS.values()}
    return "\n".join(path.read_text() for path in files if path.name not in names)


def own_fields(config_class):
    return [field for field in dataclasses.fields(config_class) if field.name in config_class.__annotations__]


@pytest.mark.parametrize("config_class", CONFIGS, ids=lambda config_class: config_class.__name__)
def test_each_field_is_read_or_refused(config_class):
    module, _, unbuilt = CONFIGS[config_class]
    # beside the readers: what the configuration turns into other fields (init_method_std into init_method)
    derived = inspect.getsource(config_class.__post_init__)
    text, any_value = sources(), getattr(module, "ANY_VALUE", ())
    for field in own_fields(config_class):
        is_read = re.search(rf"config\.{field.name}\b", text) is not None
        if field.name in any_value:
            assert not is_read, f"{config_class.__name__}.{field.name} is read: it belongs in _USED"
        elif field.name not in unbuilt:
            is_derived_from = re.search(rf"self\.{field.name}\b", derived) is not None
            assert is_read or is_derived_from, f"{config_class.__name__}.{field.name} has no effect: use it, or take it out of _USED"


@pytest.mark.parametrize("config_class", CONFIGS, ids=lambda config_class: config_class.__name__)
def test_each_unbuilt_field_is_refused_by_name(config_class):
    _, needed, unbuilt = CONFIGS[config_class]
    assert unbuilt
    for name, default in unbuilt.items():
        value = OTHER_VALUES.get(type(default), lambda value: "x")(default)
        with pytest.raises(ValueError, match=rf"{config_class.__name__}\.{name} = .* is not built yet; leave it at"):
            config_class(**needed, **{name: value})
        config_class(**needed, **{name: default})


def test_a_derived_configuration_may_have_fields_of_its_own():
    @dataclasses.dataclass
    class Mine(ModelParallelConfig):
        mine: int = 0

    assert Mine(mine=1).mine == 1
    with pytest.raises(ValueError, match=r"Mine\.variable_seq_lengths = True is not built yet"):
        Mine(variable_seq_lengths=True)
