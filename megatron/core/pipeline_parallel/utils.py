"""Where a rank stands in the pipeline."""

from typing import Any

from megatron.core.utils import get_pg_rank, get_pg_size


def is_pp_first_stage(pp_group: Any) -> bool:
    return get_pg_rank(pp_group) == 0


def is_pp_last_stage(pp_group: Any) -> bool:
    return get_pg_rank(pp_group) == get_pg_size(pp_group) - 1
