"""Ranks that hold the same shards share the work: each byte is written once and read once, and all have all."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor, StrictHandling, reading
from megatron.core.dist_checkpointing.replicas import Held, share_out
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper, FullyParallelSaveStrategyWrapper
from tests.distributed import run_on_ranks

SIZES = (40, 7, 25, 60, 3, 31, 12, 55)  # rows of the replicated tensors
COLUMNS = 300  # a row is 1200 bytes


@settings(max_examples=100, deadline=None)
@given(
    shards=st.lists(st.tuples(st.integers(0, 1000), st.sets(st.integers(0, 3), min_size=1)), max_size=30),
)
def test_work_is_shared_out_evenly(shards: list[tuple[int, set[int]]]) -> None:
    held: list[list[Held]] = [[] for _ in range(4)]
    for number, (size, ranks) in enumerate(shards):
        for rank in ranks:
            held[rank].append(Held((str(number), (0,), (size,)), torch.uint8, False, "cpu"))
    shares = share_out(held)
    assert shares == share_out(held) and len(shares) == len(shards)
    load = [0] * 4
    for (name, _, (size,)), rank in shares.items():
        assert rank in shards[int(name)][1], "one that holds it"
        load[rank] += size
    if all(ranks == {0, 1, 2, 3} for _, ranks in shards):
        assert max(load) - min(load) <= max((size for size, _ in shards), default=0)


def state_of(rank: int, fill: float | None = None) -> dict[str, Any]:
    """Four ranks in two groups of two: `split` has a half in each group, `own` a quarter on each rank, the rest is everywhere."""
    group, replica = divmod(rank, 2)

    def data(number: int, rows: int, columns: int = COLUMNS) -> torch.Tensor:
        return torch.arange(rows * columns).view(rows, columns) + 1000.0 * number if fill is None else torch.full((rows, columns), fill)

    state: dict[str, Any] = {}
    for number, rows in enumerate(SIZES):
        state[f"w{number}"] = ShardedTensor.from_rank_offsets(f"w{number}", data(number, rows), replica_id=(0, group, replica))
    state["split"] = ShardedTensor.from_rank_offsets("split", data(10 + group, 20), (0, group, 2), replica_id=(0, 0, replica))
    state["own"] = ShardedTensor.from_rank_offsets("own", data(20 + rank, 15), (0, rank, 4))
    turned = data(30, COLUMNS, 9).t()  # not contiguous
    state["turned"] = ShardedTensor.from_rank_offsets("turned", turned, replica_id=(0, group, replica))
    state["scalar"] = ShardedTensor.from_rank_offsets("scalar", torch.tensor(5.0 if fill is None else fill), replica_id=(0, group, replica))
    state["step"] = 3
    return state


def my_group() -> dist.ProcessGroup:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return groups[dist.get_rank() // 2]


def written_and_read(folder: str) -> list:
    rank, group = dist.get_rank(), my_group()
    plain, shared = os.path.join(folder, "plain"), os.path.join(folder, "shared")
    dist_checkpointing.save(state_of(rank), plain)
    dist_checkpointing.save(state_of(rank), shared, FullyParallelSaveStrategyWrapper(None, group))
    counted: list[int] = []
    original = reading._read

    def count(*args: Any) -> int:
        counted.append(original(*args))
        return counted[-1]

    reading._read = count  # type: ignore[assignment]
    found = []
    for where, strategy in ((plain, None), (shared, FullyParallelLoadStrategyWrapper(None, group)), (plain, strategy_of(group))):
        counted.clear()
        state = state_of(rank, fill=-1.0)
        loaded = dist_checkpointing.load(state, where, strategy)
        expected = state_of(rank)
        for name, value in expected.items():
            if isinstance(value, ShardedTensor):
                assert value.data is not None and torch.equal(loaded[name], value.data), name
                assert loaded[name] is state[name].data, "filled in place"
        assert loaded["step"] == 3
        found.append(sum(counted))
    return found


def strategy_of(group: dist.ProcessGroup) -> FullyParallelLoadStrategyWrapper:
    return FullyParallelLoadStrategyWrapper(FullyParallelLoadStrategyWrapper(), group, True)


def test_each_byte_is_written_and_read_once(tmp_path: Path) -> None:
    for name in ("plain", "shared"):
        (tmp_path / name).mkdir()
    read = run_on_ranks(4, written_and_read, str(tmp_path))
    row = 4 * COLUMNS
    replicated, small = (sum(SIZES) + 9) * row, 40 * 2000  # the torch.save around each of some 40 tensors
    size = {name: [(tmp_path / name / f"__{rank}_0.distcp").stat().st_size for rank in range(4)] for name in ("plain", "shared")}
    assert abs(sum(size["plain"]) - sum(size["shared"])) < 4000, "each shard once, whoever writes it"
    assert size["plain"][0] > replicated + 35 * row and max(size["plain"][1], size["plain"][3]) < 15 * row + small
    assert abs(size["shared"][0] - size["shared"][1]) < 8 * row, "the first group's ranks wrote as much as each other"
    assert abs(size["shared"][2] - size["shared"][3]) < 22 * row, "of the second's both hold `split` alone"
    for first, second in ((0, 1), (2, 3)):
        alone, halves = read[first][0], (read[first][1], read[second][1])
        assert abs(sum(halves) - (alone + 15 * row)) < small, "what both want is read by one of them"
        assert abs(halves[0] - halves[1]) < 8 * row + small
        assert read[first][2] < 0.6 * alone, "whoever wrote it"
    for name in ("plain", "shared"):
        whole = dist_checkpointing.load_plain_tensors(tmp_path / name)
        assert torch.equal(whole["w3"], state_of(0)["w3"].data) and whole["own"].shape == (60, COLUMNS)


def experts(rank: int, fill: float | None = None) -> dict[str, Any]:
    """Four data-parallel ranks with two expert-parallel ones: a dense tensor on all, two experts on every other rank each."""
    state: dict[str, Any] = {}
    for name, value, place, replica in (("dense", 7.0, (0, 0, 1), rank), ("expert", 10.0 + rank % 2, (0, rank % 2, 2), rank // 2)):
        for number in range(4):
            data = torch.full((8, 50), fill if fill is not None else value + number)
            state[f"{name}{number}"] = ShardedTensor.from_rank_offsets(f"{name}{number}", data, place, replica_id=replica)
    return state


def save_and_load_experts(folder: str) -> int:
    """The number of bytes that this rank read."""
    rank, group = dist.get_rank(), dist.group.WORLD
    dist_checkpointing.save(experts(rank), folder, FullyParallelSaveStrategyWrapper(None, group))
    counted: list[int] = []
    original = reading._read

    def count(*args: Any) -> int:
        counted.append(original(*args))
        return counted[-1]

    reading._read = count  # type: ignore[assignment]
    loaded = dist_checkpointing.load(experts(rank, fill=-1.0), folder, FullyParallelLoadStrategyWrapper(None, group))
    for name, value in experts(rank).items():
        assert torch.equal(loaded[name], value.data), name
    return sum(counted)


def test_shards_that_a_part_of_the_group_holds(tmp_path: Path) -> None:
    read = run_on_ranks(4, save_and_load_experts, str(tmp_path))
    written = [(tmp_path / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    each = 3 * 8 * 50 * 4  # 4 dense ones and 2 x 4 experts, of 4 ranks
    assert all(each <= size < each + 12000 for size in (*read, *written)), (read, written)
    assert dist_checkpointing.load_plain_tensors(tmp_path)["expert3"].unique().tolist() == [13.0, 14.0]


def two_main_copies(folder: str) -> str:
    rank, group = dist.get_rank(), my_group()
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3), replica_id=(0, 0, 0) if rank < 2 else (0, 1, rank))}
    try:
        dist_checkpointing.save(state, folder, FullyParallelSaveStrategyWrapper(None, group))
    except ValueError as error:
        return str(error)
    return "saved"


def test_two_main_copies_are_refused_on_all_ranks(tmp_path: Path) -> None:
    for told in run_on_ranks(4, two_main_copies, str(tmp_path)):
        assert "w: ranks 0 and 1 of the group have replica_id 0 for the block (3,) at (0,)" in told


def changing_state(rank: int, change: str | None, fill: float) -> dict[str, Any]:
    """`all` on both ranks, `own0` on rank 0, `own1` on rank 1, where something changes."""
    whole = {"all": torch.full((4,), fill), f"own{rank}": torch.full((3,), fill + rank)}
    replica = 1 - rank if change == "replica" else rank
    if rank == 1 and change == "shape":
        whole["own1"] = torch.full((5,), fill)
    if rank == 1 and change == "dtype":
        whole["own1"] = whole["own1"].double()
    if rank == 1 and change == "key":
        whole["more"] = torch.full((2,), fill)
    if rank == 1 and change == "fewer":
        del whole["own1"]
    state: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(key, data, replica_id=replica if key == "all" else 0) for key, data in whole.items()
    }
    if rank == 1 and change == "object":
        state["object"] = ShardedObject("object", fill, (1,), (0,))
    return {**state, "step": fill}


def save_again(folder: str, change: str) -> list[bool]:
    """Four saves with one strategy, of which the third has another structure: whether each but the first went by the plan before it."""
    rank = dist.get_rank()
    strategy = FullyParallelSaveStrategyWrapper(None, dist.group.WORLD, do_cache_distribution=True)
    went_by_it = []
    for number, how in enumerate((None, None, change, change)):
        before, where = strategy.agreed, os.path.join(folder, f"{change} {number}")
        if rank == 0:
            os.mkdir(where)
        dist_checkpointing.save(changing_state(rank, how, float(number)), where, strategy)
        went_by_it.append(strategy.agreed is before)
        wanted = {key: value for key, value in changing_state(rank, how, -1.0).items() if key != "step"}
        loaded = dist_checkpointing.load(wanted, where, strict=StrictHandling.RAISE_ALL)
        for key, value in changing_state(rank, how, float(number)).items():
            expected = value.data if isinstance(value, ShardedTensor | ShardedObject) else value
            assert torch.equal(torch.as_tensor(loaded[key]), torch.as_tensor(expected)), (number, key)
    return went_by_it[1:]


CHANGES = ("shape", "key", "dtype", "replica", "fewer", "object")


def save_all_again(folder: str) -> dict[str, list[bool]]:
    return {change: save_again(folder, change) for change in CHANGES}


def test_a_changed_structure_is_planned_anew(tmp_path: Path) -> None:
    assert run_on_ranks(2, save_all_again, str(tmp_path)) == [{change: [True, False, True] for change in CHANGES}] * 2
