"""Every kind of exchange under every mask against one process: outputs, dQ, dK and dV in float64, and what is sent."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.context_parallel import communication
from megatron.core.context_parallel.attention import KINDS
from megatron.core.context_parallel.combinations import COMM_TYPES, SUPPORTED
from megatron.core.context_parallel.sequence_split import split_for_context_parallel, split_packed
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.distributed import run_on_ranks

HEADS, D = 8, 8
# query groups and backend: blocks by kernels, with grouped queries and without, and by their plain twin
KERNELS = ((4, AttnBackend.auto), (HEADS, AttnBackend.auto), (4, AttnBackend.unfused))
CAUSAL, NO_MASK = AttnMaskType.causal, AttnMaskType.no_mask


def packed(real: list[int], padded: list[int]) -> PackedSeqParams:
    counts = [torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32) for lengths in (real, padded)]
    return PackedSeqParams("thd", counts[0], counts[0], counts[1], counts[1])


def documents_mask(seq: int, batch: int) -> torch.Tensor:
    """What --reset-attention-mask makes: [b, 1, s, s], each row of the batch with borders of its own."""
    starts = torch.stack([torch.arange(seq) // (5 + 4 * row) for row in range(batch)])
    key = torch.arange(seq)
    return ((starts[:, :, None] != starts[:, None, :]) | (key > key[:, None]))[:, None]


def cases(cp: int) -> dict[str, dict[str, Any]]:
    """Name -> sequence length, batch, mask type, window, mask tensor, packed sequences."""
    seq = 16 * cp
    unit = 2 * cp
    nothing_seen = documents_mask(seq, 2)
    nothing_seen[:, :, 3] = True
    return {
        "a causal mask": {"seq": seq, "batch": 2, "type": CAUSAL},
        "no mask": {"seq": seq, "batch": 2, "type": NO_MASK},
        "a sliding window": {"seq": seq, "batch": 2, "type": CAUSAL, "window": (5, 0)},
        "a sliding window to both sides": {"seq": seq, "batch": 1, "type": NO_MASK, "window": (3, 6)},
        "a sliding window to one side": {"seq": seq, "batch": 1, "type": NO_MASK, "window": (4, -1)},
        "a sliding window wider than all": {"seq": seq, "batch": 1, "type": CAUSAL, "window": (10 * seq, 0)},
        "packed sequences": {"batch": 1, "type": CAUSAL, "packed": packed([unit, 3 * unit - 3, 1], [unit, 3 * unit, unit])},
        "packed sequences, no mask": {"batch": 1, "type": NO_MASK, "packed": packed([unit - 1, 2 * unit, 0], [unit, 2 * unit, unit])},
        "packed sequences, a window": {"batch": 1, "type": CAUSAL, "window": (3, 0), "packed": packed([3 * unit, unit], [3 * unit, unit])},
        "an attention mask": {"seq": seq, "batch": 2, "type": CAUSAL, "mask": documents_mask(seq, 2)},
        "an attention mask alone": {"seq": seq, "batch": 2, "type": AttnMaskType.arbitrary, "mask": nothing_seen},
        "an attention mask and a window": {"seq": seq, "batch": 2, "type": CAUSAL, "window": (4, 0), "mask": documents_mask(seq, 1)},
    }


def core_of(case: dict[str, Any], groups: int, backend: AttnBackend, comm_type: str | None, collection: Any, cp: int, **more: Any) -> Any:
    config = TransformerConfig(
        num_layers=4,
        hidden_size=HEADS * D,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        attention_dropout=0.0,
        attention_backend=backend,
        window_size=case.get("window"),
        context_parallel_size=cp,
        cp_comm_type=comm_type,
        hierarchical_context_parallel_sizes=[2, cp // 2] if comm_type == "a2a+p2p" else None,
        **more,
    )
    return DotProductAttention(config, 3, case["type"], "self", pg_collection=collection)


def run(core: Any, tensors: list[torch.Tensor], weight: torch.Tensor, mask: Any, params: Any) -> list[torch.Tensor]:
    """Output, dQ, dK, dV."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = core(*leaves, mask, packed_seq_params=params)
    (out * weight).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


def differences(comm_type: str, case: dict[str, Any], groups: int, backend: AttnBackend, dtype: torch.dtype, **more: Any) -> list[float]:
    """Of output, dQ, dK, dV of this rank's tokens from one process with the plain twin, relative to the largest value."""
    collection = ProcessGroupCollection.use_mpu_process_groups()
    cp, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    params, mask = case.get("packed"), case.get("mask")
    seq = int(params.cu_seqlens_q_padded[-1]) if params else case["seq"]
    generator = torch.Generator().manual_seed(0)
    shapes = [(seq, case["batch"], heads, D) for heads in (HEADS, groups, groups)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    weight = torch.randn(seq, case["batch"], HEADS * D, generator=generator, dtype=torch.float64)

    def part(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return split_packed(tensor, dim, params, rank, cp) if params else split_for_context_parallel(tensor, dim, rank, cp)

    expected = run(core_of(case, groups, AttnBackend.unfused, None, ProcessGroupCollection(), 1, **more), tensors, weight, mask, params)
    core = core_of(case, groups, backend, comm_type, collection, cp, **more)
    local = [part(tensor).to(dtype) for tensor in tensors]
    got = run(core, local, part(weight).to(dtype), None if mask is None else part(mask, 2), params)
    if dtype is torch.bfloat16:  # against what it was given
        rounded = [tensor.to(dtype).double() for tensor in tensors]
        alone = core_of(case, groups, AttnBackend.unfused, None, ProcessGroupCollection(), 1, **more)
        expected = run(alone, rounded, weight.to(dtype).double(), mask, params)
    return [float((mine.double() - part(whole)).abs().max() / whole.abs().max()) for mine, whole in zip(got, expected, strict=True)]


def start(cp: int, comm_type: str) -> None:
    parallel_state.destroy_model_parallel()
    sizes = [2, cp // 2] if comm_type == "a2a+p2p" else None
    parallel_state.initialize_model_parallel(context_parallel_size=cp, hierarchical_context_parallel_sizes=sizes)


def all_differences(cp: int) -> dict[tuple, list[float]]:
    found = {}
    for comm_type in COMM_TYPES:
        start(cp, comm_type)
        for (name, case), (groups, backend) in itertools.product(cases(cp).items(), KERNELS):
            found[comm_type, name, groups, backend.name] = differences(comm_type, case, groups, backend, torch.float64)
    return found


def other_differences(cp: int) -> dict[str, list[float]]:
    """Precisions and scales, with the causal mask of one kind each."""
    found = {}
    for comm_type in COMM_TYPES:
        start(cp, comm_type)
        case = cases(cp)["a causal mask"]
        found[f"{comm_type} bf16"] = differences(comm_type, case, 4, AttnBackend.auto, torch.bfloat16)
        found[f"{comm_type} fp32"] = differences(comm_type, case, 4, AttnBackend.auto, torch.float32)
        found[f"{comm_type} scale"] = differences(comm_type, case, 4, AttnBackend.auto, torch.float64, softmax_scale=0.7)
        layer = {"apply_query_key_layer_scaling": True, "softmax_scale": 0.2}
        found[f"{comm_type} layer"] = differences(comm_type, case, 4, AttnBackend.unfused, torch.float64, **layer)
    return found


def size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


SENT_BY: dict[str, Any] = {
    "batch_isend_irecv": lambda operations: sum(size(op.tensor) for op in operations if op.op is dist.isend),
    "all_gather_into_tensor": lambda out, mine, group: size(out) - size(mine),
    "reduce_scatter_tensor": lambda out, mine, group: size(mine) - size(out),
    "all_to_all_single": lambda out, mine, group: size(mine) * (group.size() - 1) // group.size(),
}


def counting(name: str, counted: list[int]) -> Any:
    """The collective, its bytes added to the last of `counted`."""
    function = getattr(dist, name)

    def count(*arguments: Any, **options: Any) -> Any:
        counted[-1] += SENT_BY[name](*arguments, **options)
        return function(*arguments, **options)

    return count


def sent_bytes(cp: int) -> dict[str, list[int]]:
    """Bytes that this rank hands to communication, forward and backward, by kind; b = 1."""
    found = {}
    for comm_type in COMM_TYPES:
        start(cp, comm_type)
        case = {"seq": 16 * cp, "batch": 1, "type": CAUSAL}
        core = core_of(case, 4, AttnBackend.auto, comm_type, ProcessGroupCollection.use_mpu_process_groups(), cp)
        leaves = [torch.randn(16, 1, heads, D).requires_grad_() for heads in (HEADS, 4, 4)]
        counted = found[comm_type] = [0]
        with mock.patch.multiple(communication.dist, **{name: counting(name, counted) for name in SENT_BY}):
            out = core(*leaves, None)
            counted.append(0)
            out.sum().backward()
    return found


def refusals() -> dict[str, str]:
    start(2, "p2p")
    collection = ProcessGroupCollection.use_mpu_process_groups()
    found = {}

    def refused(name: str, call: Any) -> None:
        try:
            call()
            found[name] = "accepted"
        except ValueError as error:
            found[name] = str(error)

    case = {"seq": 8, "batch": 1, "type": CAUSAL}
    core = core_of(case, 4, AttnBackend.auto, "p2p", collection, 2)
    tensors = [torch.randn(5, 1, heads, D) for heads in (HEADS, 4, 4)]
    refused("lengths 4 and 3", lambda: core(*tensors, None, packed_seq_params=packed([4, 3], [4, 6])))
    refused("lengths as they are", lambda: core(*[t[:4] for t in tensors], None, packed_seq_params=packed([4, 3], [4, 3])))
    refused("other tokens", lambda: core(*[t[:4] for t in tensors], None, packed_seq_params=packed([4, 8], [4, 8])))
    refused("a whole mask", lambda: core(*[t[:4] for t in tensors], torch.zeros(1, 1, 8, 8, dtype=torch.bool)))
    refused("a bias", lambda: core(*[t[:4] for t in tensors], None, attention_bias=torch.zeros(1)))
    refused("two levels", lambda: DotProductAttention(core.config, 1, CAUSAL, "self", cp_comm_type="a2a+p2p", pg_collection=collection))
    refused("an unknown kind", lambda: DotProductAttention(core.config, 1, CAUSAL, "self", cp_comm_type="b2b", pg_collection=collection))
    refused("dropout", lambda: DotProductAttention(core.config, 1, CAUSAL, "self", attention_dropout=0.1, pg_collection=collection))
    no_mask = core_of(case | {"type": NO_MASK}, 4, AttnBackend.auto, "p2p", collection, 2)
    window = core_of(case | {"window": (3, 0)}, 4, AttnBackend.auto, "p2p", collection, 2)
    whole = [t[:4] for t in tensors]
    rows: dict[str, Any] = {
        "a causal mask": lambda: core(*whole, None),
        "no mask": lambda: no_mask(*whole, None),
        "a sliding window": lambda: window(*whole, None),
        "packed sequences": lambda: core(*whole, None, packed_seq_params=packed([4, 4], [4, 4])),
        "an attention mask": lambda: core(*whole, torch.zeros(1, 1, 4, 8, dtype=torch.bool)),
    }
    for row, call in rows.items():
        call()
        with mock.patch.dict(SUPPORTED, {row: ("a2a",)}):
            refused(f"row {row}", call)
    refused("other groups", lambda: DotProductAttention(core.config, 1, CAUSAL, "self", pg_collection=ProcessGroupCollection()))
    return found


def everything(cp: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    found = {"differences": all_differences(cp), "others": other_differences(cp), "bytes": sent_bytes(cp)}
    return found | ({"refusals": refusals()} if cp == 2 else {})


@pytest.fixture(scope="module")
def ranks() -> Any:
    """What each rank of 2 and of 4 found, each world started once."""
    kept: dict[int, list[dict[str, Any]]] = {}

    def of(cp: int) -> list[dict[str, Any]]:
        if cp not in kept:
            kept[cp] = run_on_ranks(cp, everything, cp)
        return kept[cp]

    return of


@pytest.mark.parametrize("cp", [2, 4])
def test_equals_one_process(ranks: Any, cp: int) -> None:
    results = [found["differences"] for found in ranks(cp)]
    assert len(results[0]) == len(COMM_TYPES) * len(cases(cp)) * len(KERNELS)
    bad = {(rank, *key): errors for rank, found in enumerate(results) for key, errors in found.items() if not max(errors) <= 1e-9}
    assert not bad, bad
    rows = {row for row in SUPPORTED if SUPPORTED[row]}
    assert rows <= set(cases(cp)), "the table of combinations has a row without a case"


def test_every_kind_has_its_function() -> None:
    assert tuple(KINDS) == COMM_TYPES


@pytest.mark.parametrize("cp", [2, 4])
def test_precision_and_scale(ranks: Any, cp: int) -> None:
    bounds = {"bf16": 2e-2, "fp32": 1e-5, "scale": 1e-9, "layer": 1e-9}
    for found in ranks(cp):
        for name, errors in found["others"].items():
            assert max(errors) <= bounds[name.split()[-1]], (name, errors)


@pytest.mark.parametrize("cp", [2, 4])
def test_bytes_sent_equal_the_formula(ranks: Any, cp: int) -> None:
    """Of a rank's queries (and output) q bytes, and keys and values together kv bytes."""
    q, kv = 16 * HEADS * D * 4, 2 * 16 * 4 * D * 4
    away = cp - 1
    inner, outer = 2, cp // 2
    exchange = (2 * q + kv) * (inner - 1) // inner
    expected = {
        "p2p": [away * kv, (2 * away - 1) * kv],
        "all_gather": [away * kv, 2 * away * kv],
        "a2a": [(2 * q + kv) * away // cp, (2 * q + kv) * away // cp],
        "a2a+p2p": [exchange + (outer - 1) * kv, exchange + max(2 * (outer - 1) - 1, 0) * kv],
    }
    for found in ranks(cp):
        assert found["bytes"] == expected


def test_what_would_be_wrong_is_refused_by_name(ranks: Any) -> None:
    """Packed lengths that the ranks do not divide would drop tokens (a last token was lost when 4 and 3 were padded to 10)."""
    found, other = (found["refusals"] for found in ranks(2))
    assert found == other
    for name in ("lengths 4 and 3", "lengths as they are"):
        assert "each sequence must be padded to a multiple of 2*CP = 4" in found[name]
    expected = {
        "other tokens": "packed sequences of 12 tokens, but the ranks hold 2 x 4",
        "a whole mask": "the rows of this rank's 4 queries and the columns of all 8 keys",
        "a bias": "attention_bias",
        "two levels": "hierarchical_context_parallel_sizes",
        "an unknown kind": "'b2b' must be one of p2p, all_gather, a2a, a2a+p2p",
        "dropout": "p2p does not go with attention dropout: context_parallel_size 1 does",
        **{f"row {row}": f"cp_comm_type p2p does not go with {row}; a2a does" for row in SUPPORTED if SUPPORTED[row]},
        "other groups": "the context-parallel group has 1 ranks but config.context_parallel_size is 2",
    }
    for name, words in expected.items():
        assert words in found[name], (name, found[name])
