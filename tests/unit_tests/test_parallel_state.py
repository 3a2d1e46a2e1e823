"""The façade and the groups it creates, alone and on several processes."""

import pytest
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.process_groups_config import GROUPS, ProcessGroupCollection, default_pg_collection
from megatron.core.utils import get_pg_size
from tests.distributed import run_on_ranks


@pytest.fixture(autouse=True)
def forget():
    yield
    parallel_state.destroy_model_parallel()


def test_alone_without_torch_distributed():
    assert not parallel_state.is_initialized()
    assert parallel_state.get_tensor_model_parallel_world_size() == 1
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        parallel_state.get_data_parallel_group()
    assert all(get_pg_size(getattr(default_pg_collection(None), name)) == 1 for name in GROUPS)
    parallel_state.initialize_model_parallel()
    assert parallel_state.model_parallel_is_initialized() and parallel_state.get_data_parallel_group() is None
    assert parallel_state.is_pipeline_first_stage() and parallel_state.is_pipeline_last_stage()
    with pytest.raises(RuntimeError, match="already"):
        parallel_state.initialize_model_parallel()


def test_what_is_not_built_is_refused():
    with pytest.raises(ValueError, match="use_sharp"):
        parallel_state.initialize_model_parallel(use_sharp=True)
    with pytest.raises(ValueError, match="not divisible"):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match="unknown process groups"):
        ProcessGroupCollection(tensor=None)


def test_virtual_stages():
    parallel_state.initialize_model_parallel(virtual_pipeline_model_parallel_size=2)
    assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 0
    assert not parallel_state.is_pipeline_last_stage(ignore_virtual=False)
    parallel_state.set_virtual_pipeline_model_parallel_rank(1)
    assert parallel_state.is_pipeline_last_stage(ignore_virtual=False) and not parallel_state.is_pipeline_first_stage(ignore_virtual=False)


def _describe():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    for name in GROUPS:
        assert get_pg_size(getattr(groups, name)) == len(parallel_state._global_ranks(name))
    one = parallel_state.get_data_parallel_group()
    assert one is not None and one.size() == 1, "a group of one rank is a group: None would mean the world to torch.distributed"
    return {
        "tp": dist.get_process_group_ranks(groups.tp),
        "pp": dist.get_process_group_ranks(groups.pp),
        "embd": dist.get_process_group_ranks(groups.embd),
        "pos_embd": groups.pos_embd is not None,
        "last": parallel_state.get_pipeline_model_parallel_last_rank(),
        "next": parallel_state.get_pipeline_model_parallel_next_rank(),
    }


def test_four_ranks():
    seen = run_on_ranks(4, _describe)
    assert [rank["tp"] for rank in seen] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [rank["pp"] for rank in seen] == [[0, 2], [1, 3], [0, 2], [1, 3]] == [rank["embd"] for rank in seen]
    assert [rank["pos_embd"] for rank in seen] == [True, True, False, False]
    assert [rank["last"] for rank in seen] == [2, 3, 2, 3] and [rank["next"] for rank in seen] == [2, 3, 0, 1]
