"""Each element of each tensor is written once, or the save is refused with what is wrong; what a load may miss is as `strict` says."""

import itertools
import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import CheckpointError, ShardedObject, ShardedTensor, StrictHandling
from megatron.core.dist_checkpointing.validation import check_whole
from tests.distributed import run_on_ranks

Box = tuple[tuple[int, ...], tuple[int, ...]]


def plan_of(shape: tuple[int, ...], boxes: list[Box], objects: tuple[str, ...] = (), dtype: torch.dtype = torch.float32) -> SavePlan:
    items = []
    for offset, size in boxes:
        chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
        data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
        items.append(WriteItem(MetadataIndex("w", torch.Size(offset)), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items + [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in objects])


@st.composite
def covers(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[Box]]]:
    """A shape, and the boxes of three ranks: cut from the whole, then perhaps one of them moved, stretched, lost or doubled."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        index, axis = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(shape) - 1))
        offset, size = boxes[index]
        if size[axis] > 1:
            at = draw(st.integers(1, size[axis] - 1))
            boxes[index] = (offset, (*size[:axis], at, *size[axis + 1 :]))
            rest = (*size[:axis], size[axis] - at, *size[axis + 1 :])
            boxes.append(((*offset[:axis], offset[axis] + at, *offset[axis + 1 :]), rest))
    for _ in range(draw(st.integers(0, 2))):
        index, axis = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(shape) - 1))
        offset, size = boxes[index]
        change = draw(st.sampled_from(["move", "lose", "double", "grow"]))
        if change == "lose" and len(boxes) > 1:
            boxes.pop(index)
        elif change == "double":
            boxes.append(boxes[index])
        elif change == "move" and offset[axis] > 0:
            boxes[index] = ((*offset[:axis], offset[axis] - 1, *offset[axis + 1 :]), size)
        elif change == "grow" and offset[axis] + size[axis] < shape[axis]:
            boxes[index] = (offset, (*size[:axis], size[axis] + 1, *size[axis + 1 :]))
    return shape, [boxes[rank::3] for rank in range(3)]


@settings(max_examples=300, deadline=None)
@given(cover=covers())
def test_whole_is_what_an_element_by_element_count_calls_whole(cover: tuple[tuple[int, ...], list[list[Box]]]) -> None:
    shape, of_ranks = cover
    count = torch.zeros(shape)
    for offset, size in itertools.chain(*of_ranks):
        count[tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))] += 1
    plans = [plan_of(shape, boxes) for boxes in of_ranks]
    if bool((count == 1).all()):
        check_whole(plans)
    else:
        with pytest.raises(CheckpointError, match="w: "):
            check_whole(plans)


HALVES: list[Box] = [((0, 0), (2, 3)), ((2, 0), (2, 3))]
WHOLE: list[Box] = [((0, 0), (4, 3))]


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ([plan_of((4, 3), WHOLE), plan_of((4, 3), WHOLE)], r"w: ranks 0 and 1 both write the block \(4, 3\) at \(0, 0\).*replica_id 0"),
        ([plan_of((4, 3), HALVES[:1]), plan_of((4, 3), [])], r"w: 1 shards hold 6 of 12 elements"),
        ([plan_of((4, 3), WHOLE), plan_of((4, 3), HALVES[1:])], r"w: the blocks \(4, 3\) at \(0, 0\) of rank 0 and .* of rank 1 overlap"),
        ([plan_of((4, 3), HALVES[:1]), plan_of((5, 3), HALVES[1:])], r"w is \(4, 3\) of .*float32 on rank 0, \(5, 3\) of .* on rank 1"),
        ([plan_of((), [((), ())]), plan_of((), [((), ())])], r"w: ranks 0 and 1 both write the block \(\) at \(\)"),
        ([plan_of((4, 3), WHOLE, ("o/shard_0_1",)), plan_of((4, 3), [], ("o/shard_0_1",))], "o/shard_0_1: ranks 0 and 1 both write it"),
        ([plan_of((4, 3), WHOLE, ("o/shard_0.1_1.2",))], r"o: 1 of its 2 objects are written, a grid of \(1, 2\)"),
    ],
)
def test_what_is_wrong_is_said(plans: list[SavePlan], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_whole(plans)


def test_two_copies_on_one_rank_are_refused(tmp_path: Path) -> None:
    state = {name: ShardedTensor.from_rank_offsets("w", torch.ones(3)) for name in "ab"}
    with pytest.raises(ValueError, match=r"w: two tensors of one rank have replica_id 0 for the block \(3,\) at \(0,\)"):
        dist_checkpointing.save(state, tmp_path)


def save_twice(folder: str) -> list[str]:
    """Both ranks call themselves the main replica, then neither, then as it should be."""
    told = []
    for replicas in ((0, 0), (1, 1), (0, 1)):
        rank = torch.distributed.get_rank()
        state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3), replica_id=replicas[rank])}
        try:
            dist_checkpointing.save(state, folder)
            told.append("saved")
        except ValueError as error:
            told.append(str(error))
    return told


def test_every_rank_hears_what_is_wrong(tmp_path: Path) -> None:
    for told in run_on_ranks(2, save_twice, str(tmp_path)):
        assert "w: ranks 0 and 1 both write the block (3,) at (0,)" in told[0]
        assert "w: no rank writes it: none of its copies has replica_id 0" in told[1]
        assert told[2] == "saved"


def stored(folder: Path) -> None:
    state = {"a": ShardedTensor.from_rank_offsets("a", torch.ones(2)), "b": ShardedTensor.from_rank_offsets("b", torch.ones(2))}
    dist_checkpointing.save({**state, "o": ShardedObject("o", 1, (1,), (0,)), "iteration": 1}, folder)


def wanted(*names: str) -> dict:
    return {name: ShardedTensor.from_rank_offsets(name, torch.zeros(2)) for name in names}


UNEXPECTED = {"c"}
MISSING = {"b", "o/shard_0_1"}


@pytest.mark.parametrize("strict", list(StrictHandling))
@pytest.mark.parametrize("names", ["a", "ac"])
def test_strictness(tmp_path: Path, caplog: pytest.LogCaptureFixture, strict: StrictHandling, names: str) -> None:
    """`b` and `o` are missing from the request, `c` from the checkpoint."""
    stored(tmp_path)
    unexpected = UNEXPECTED & set(names)
    told = {
        StrictHandling.ASSUME_OK_UNEXPECTED: unexpected,
        StrictHandling.RAISE_UNEXPECTED: unexpected,
        StrictHandling.RAISE_ALL: unexpected | MISSING,
        StrictHandling.LOG_UNEXPECTED: unexpected,
        StrictHandling.LOG_ALL: unexpected | MISSING,
    }.get(strict, set())
    with caplog.at_level(logging.WARNING, "megatron"):
        if told and ("raise" in strict.value or strict == StrictHandling.ASSUME_OK_UNEXPECTED):
            with pytest.raises(CheckpointError) as caught:
                dist_checkpointing.load(wanted(*names), tmp_path, strict=strict)
            assert {word for word in str(caught.value).split() if word in MISSING | UNEXPECTED} == told
            return
        found = dist_checkpointing.load(wanted(*names), tmp_path, strict=strict.value)
    logged = {word for record in caplog.records for word in record.getMessage().split() if word in MISSING | UNEXPECTED}
    assert logged == (told if "log" in strict.value else set())
    if "return" in strict.value:
        found, missing, not_there = found
        assert not_there == unexpected and missing == (MISSING if strict == StrictHandling.RETURN_ALL else set())
    assert torch.equal(found["a"], torch.ones(2)) and found["iteration"] == 1
    assert "c" not in names or torch.equal(found["c"], torch.zeros(2)), "it keeps its values"


def load_apart(folder: str) -> list:
    """Rank 0 wants `a` alone, rank 1 `b` and an unknown tensor: what one rank loads is not missing on the other."""
    rank = torch.distributed.get_rank()
    names = ("a",) if rank == 0 else ("b", "c")
    _, missing, unexpected = dist_checkpointing.load(wanted(*names), folder, strict=StrictHandling.RETURN_ALL)
    try:
        dist_checkpointing.load(wanted(*names), folder)
    except CheckpointError as error:
        return [missing, unexpected, str(error)]
    return []


def test_ranks_are_strict_together(tmp_path: Path) -> None:
    stored(tmp_path)
    for missing, unexpected, told in run_on_ranks(2, load_apart, str(tmp_path)):
        assert missing == {"o/shard_0_1"} and unexpected == {"c"} and "lacks" in told and "c" in told.split()


def test_an_unknown_strictness_is_named(tmp_path: Path) -> None:
    stored(tmp_path)
    with pytest.raises(ValueError, match="very"):
        dist_checkpointing.load(wanted("a"), tmp_path, strict="very")
