"""Base class of all modules, and the wrapper that trains one in half precision."""

from typing import Any

import torch

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank, get_pg_size


class MegatronModule(torch.nn.Module):
    """A module with a config, whose checkpoint form derives from its parameters' sharding records."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict[str, Any]:
        """Parameter name -> ShardedTensor, under Megatron's checkpoint keys. Override it in a module whose tensors are stored otherwise."""
        from megatron.core.transformer.utils import sharded_state_dict_default

        return sharded_state_dict_default(self, prefix, sharded_offsets, metadata)


def convert_floats(value: Any, dtype: torch.dtype) -> Any:
    """`value` (a tensor, or a tuple, list or dict of them) with its floating-point tensors in `dtype`."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(convert_floats(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: convert_floats(item, dtype) for key, item in value.items()}
    return value


class Float16Module(MegatronModule):
    """Holds `module` in config's half precision. The first pipeline stage casts its inputs down, the last its outputs up to fp32."""

    def __init__(self, config: TransformerConfig, module: torch.nn.Module) -> None:
        super().__init__(config)
        if config.fp16 == config.bf16:
            raise ValueError(f"Float16Module needs exactly one of config.fp16 ({config.fp16}) and config.bf16 ({config.bf16})")
        self.float16_dtype = torch.float16 if config.fp16 else torch.bfloat16
        self.module = module.to(self.float16_dtype)
        self.vp_stage = getattr(module, "vp_stage", None)
        self.pg_collection = getattr(module, "pg_collection", None)

    def set_input_tensor(self, input_tensor: Any) -> None:
        self.module.set_input_tensor(input_tensor)  # type: ignore[operator]

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        pp = getattr(self.pg_collection, "pp", None)
        chunks = self.config.virtual_pipeline_model_parallel_size or 1
        stage = self.vp_stage or 0
        if get_pg_rank(pp) == 0 and stage == 0:
            inputs, kwargs = convert_floats(inputs, self.float16_dtype), convert_floats(kwargs, self.float16_dtype)
        outputs = self.module(*inputs, **kwargs)
        if fp32_output and get_pg_rank(pp) == get_pg_size(pp) - 1 and stage == chunks - 1:
            outputs = convert_floats(outputs, torch.float32)
        return outputs

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.module.sharded_state_dict(prefix, *args, **kwargs)  # type: ignore[operator]

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)
