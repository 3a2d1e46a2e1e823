"""DotProductAttention with the package flash_attn_interface: a stand-in of plain torch in its place, on a CPU that passes for a Hopper GPU.

The package's own kernels, where they are, are tried by tests/unit_tests/models/test_gpt_gpu.py.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import device, optional_imports
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import dot_product_attention, flash_attention_3
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import UsageError
from tests.unit_tests.context_parallel.test_sequence_split import packed
from tests.unit_tests.training.lines import TINY, checked

FLASH_3 = [AttnBackend.auto, AttnBackend.flash]


def softmax_attention(q: Any, k: Any, v: Any, scale: Any, causal: bool, window: tuple[int, int]) -> torch.Tensor:
    """[b, s, heads, d] by the package's conventions: the last query stands at the last key, -1 is no bound, causal bounds the right."""
    assert q.dim() == 4 and {t.dtype for t in (q, k, v)} <= {torch.bfloat16, torch.float16}
    assert q.shape[2] % k.shape[2] == 0 and all(t.stride(-1) == 1 and t.shape[-1] == q.shape[-1] for t in (q, k, v))
    (left, right), (queries, keys) = window, (q.shape[1], k.shape[1])
    right = 0 if causal else right
    row, column = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if left >= 0:
        hidden |= column < row - left
    if right >= 0:
        hidden |= column > row + right
    wide = [t.double().repeat_interleave(q.shape[2] // t.shape[2], dim=2).transpose(1, 2) for t in (q, k, v)]
    scores = (wide[0] @ wide[1].transpose(-1, -2) * scale).masked_fill(hidden, float("-inf"))
    return (scores.softmax(dim=-1) @ wide[2]).transpose(1, 2).to(q.dtype)


def documents_of(whole: Callable[..., torch.Tensor], q: Any, k: Any, v: Any, counts: Any, counts_k: Any, longest: int) -> torch.Tensor:
    assert q.dim() == 3 and counts.dtype == torch.int32 and counts is counts_k and longest == int(counts.diff().max())
    ends = counts.tolist()
    assert ends[0] == 0 and ends[-1] == len(q)
    return torch.cat([whole(*(t[None, start:end] for t in (q, k, v)))[0] for start, end in pairwise(ends)])


class Package:
    """A version of the package. `calls`: what its functions were given beside tensors."""

    def __init__(self, *, with_lse: bool = False, windows: bool = True, deterministic: bool = True, varlen: bool = True) -> None:
        self.module: Any = ModuleType("flash_attn_interface")
        self.module.__spec__ = ModuleSpec("flash_attn_interface", None)
        self.calls: list[dict[str, Any]] = []

        def finished(out: torch.Tensor) -> Any:
            return (out, torch.empty(0)) if with_lse else out

        def full(q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
                 deterministic: bool = False) -> Any:  # fmt: skip
            self.calls.append({"causal": causal, "window_size": window_size, "deterministic": deterministic})
            return finished(softmax_attention(q, k, v, softmax_scale, causal, window_size))

        def full_varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
                        seqused_q: Any = None, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
                        deterministic: bool = False) -> Any:  # fmt: skip
            self.calls.append({"causal": causal, "window_size": window_size, "cu_seqlens": cu_seqlens_q.tolist()})
            assert max_seqlen_q == max_seqlen_k and seqused_q is None

            def one(q: Any, k: Any, v: Any) -> torch.Tensor:
                return softmax_attention(q, k, v, softmax_scale, causal, window_size)

            return finished(documents_of(one, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q))

        def without_windows(q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False, deterministic: bool = False) -> Any:
            return full(q, k, v, softmax_scale, causal, (-1, -1), deterministic)

        def without_deterministic(
            q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1)
        ) -> Any:
            return full(q, k, v, softmax_scale, causal, window_size)

        functions = self.module.__dict__
        functions["flash_attn_func"] = full if windows and deterministic else without_deterministic if windows else without_windows
        if varlen:
            functions["flash_attn_varlen_func"] = full_varlen


def forget() -> None:
    for cached in (optional_imports.available, flash_attention_3.package, flash_attention_3._takes, dot_product_attention._say):
        cached.cache_clear()


@contextmanager
def installed(hopper: bool = True, **version: bool) -> Iterator[Package]:
    package = Package(**version)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn_interface", package.module)
        patch.setattr(flash_attention_3, "on_hopper", lambda: hopper)
        forget()
        yield package
    forget()


pytestmark = pytest.mark.skipif(device.has_accelerator(), reason="the stand-in is for a CPU")


def core_of(
    backend: AttnBackend, heads: int, width: int, mask_type: AttnMaskType = AttnMaskType.causal, **more: Any
) -> DotProductAttention:
    given_settings: dict[str, Any] = {"attention_dropout": 0.0, "kv_channels": width, "num_layers": 2, **more}
    config = TransformerConfig(hidden_size=heads * width, num_attention_heads=heads, attention_backend=backend, **given_settings)
    return DotProductAttention(config, 1, mask_type, "self")


def tensors(s: int, b: int, heads: int, groups: int, width: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Views of one projection, as in the model."""
    torch.manual_seed(s * 7 + b)
    mixed = torch.randn(s, b, heads + 2 * groups, width).to(dtype)
    return [part.detach().requires_grad_() for part in mixed.split([heads, groups, groups], dim=2)]


def run(core: DotProductAttention, leaves: list[torch.Tensor], **more: Any) -> list[torch.Tensor]:
    for leaf in leaves:
        leaf.grad = None
    out = core(*leaves, None, **more)
    (out.double() * torch.arange(out.numel(), dtype=torch.float64).view_as(out).sin()).sum().backward()
    return [out.detach().double(), *(leaf.grad.double() for leaf in leaves if leaf.grad is not None)]


def assert_like_the_twin(package: Package, core: DotProductAttention, leaves: list[torch.Tensor], **more: Any) -> None:
    """Output and gradients those of the plain twin in float64, within bf16's rounding."""
    before = len(package.calls)
    found = run(core, leaves, **more)
    assert len(package.calls) == before + 1
    assert found[0].shape[-1] == leaves[0].shape[-2] * leaves[2].shape[-1]
    core.backend = AttnBackend.unfused
    twin = run(core, [leaf.detach().double().requires_grad_() for leaf in leaves], **more)
    assert len(package.calls) == before + 1 and len(found) == len(twin) == 4
    torch.testing.assert_close(found, twin, rtol=2e-2, atol=2e-2)


@settings(max_examples=60, deadline=None)
@given(
    backend=st.sampled_from(FLASH_3),
    sizes=st.tuples(st.integers(2, 9), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.sampled_from([8, 24])),
    mask_type=st.sampled_from([AttnMaskType.causal, AttnMaskType.no_mask]),
    window=st.none() | st.tuples(st.integers(-1, 5), st.integers(-1, 5)),
    with_lse=st.booleans(),
    scale=st.sampled_from([None, 0.7]),
)
def test_shapes_groups_windows(backend: Any, sizes: Any, mask_type: Any, window: Any, with_lse: bool, scale: Any) -> None:
    s, b, groups, per_group, width = sizes
    heads = groups * per_group
    with installed(with_lse=with_lse) as package:
        core = core_of(backend, heads, width, mask_type, num_query_groups=groups, window_size=window, softmax_scale=scale)
        assert_like_the_twin(package, core, tensors(s, b, heads, groups, width))
        assert package.calls[0]["causal"] == (mask_type is AttnMaskType.causal or (window is not None and window[1] == 0))


@settings(max_examples=30, deadline=None)
@given(
    backend=st.sampled_from(FLASH_3),
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=4),
    window=st.none() | st.tuples(st.integers(0, 3), st.just(0)),
    with_lse=st.booleans(),
)
def test_packed_documents_with_padding(backend: AttnBackend, lengths: list, window: Any, with_lse: bool) -> None:
    real, padded_to = [n for n, _ in lengths], [n + more for n, more in lengths]
    if not sum(padded_to):
        return
    with installed(with_lse=with_lse) as package:
        core = core_of(backend, 4, 8, num_query_groups=2, window_size=window)
        leaves = tensors(sum(padded_to), 1, 4, 2, 8)
        assert_like_the_twin(package, core, leaves, packed_seq_params=packed(real, padded_to))
        assert package.calls[0]["cu_seqlens"] == packed(padded_to).cu_seqlens_q.tolist()  # type: ignore[union-attr]


def test_packed_documents_without_a_mask_see_all_of_their_own() -> None:
    with installed() as package:
        core = core_of(AttnBackend.flash, 2, 8, AttnMaskType.no_mask)
        assert_like_the_twin(package, core, tensors(9, 1, 2, 2, 8), packed_seq_params=packed([3, 6]))


def test_rows_with_gaps_are_made_dense() -> None:
    with installed() as package:
        wide = [torch.randn(5, 2, 2, 16).bfloat16()[..., ::2].requires_grad_() for _ in range(3)]
        assert_like_the_twin(package, core_of(AttnBackend.auto, 2, 8), wide)


def test_values_of_another_width_are_filled_up_by_flash_and_left_to_others_by_auto() -> None:
    query, key, _ = tensors(6, 2, 4, 4, 24)
    value = torch.randn(6, 2, 4, 16).bfloat16().requires_grad_()
    with installed() as package:
        assert_like_the_twin(package, core_of(AttnBackend.flash, 4, 24), [query, key, value])
        core_of(AttnBackend.auto, 4, 24)(query, key, value, None)
        assert len(package.calls) == 1


def random_mask() -> torch.Tensor:
    mask = torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.3
    return mask & ~torch.eye(6, dtype=torch.bool)


PADDED_WITHOUT_MASK = {"attn_mask_type": AttnMaskType.no_mask, "packed_seq_params": packed([2], [6])}
# name -> (version of the package, settings, dtype, width, arguments of the call)
NOT_DONE: dict[str, tuple[dict[str, bool], dict[str, Any], torch.dtype, int, dict[str, Any]]] = {
    "a mask": ({}, {}, torch.bfloat16, 8, {"attention_mask": random_mask()}),
    "fp32": ({}, {}, torch.float32, 8, {}),
    "wide heads": ({}, {}, torch.bfloat16, 264, {}),
    "odd heads": ({}, {}, torch.bfloat16, 12, {}),
    "padding without a causal mask": ({}, {}, torch.bfloat16, 8, PADDED_WITHOUT_MASK),
    "no Hopper": ({"hopper": False}, {}, torch.bfloat16, 8, {}),
    "a version without windows": ({"windows": False}, {"window_size": (2, 0)}, torch.bfloat16, 8, {}),
    "a version without packed documents": ({"varlen": False}, {}, torch.bfloat16, 8, {"packed_seq_params": packed([2, 4])}),
    "unfused": ({}, {"attention_backend": AttnBackend.unfused}, torch.bfloat16, 8, {}),
}  # fmt: skip


@pytest.mark.parametrize("backend", FLASH_3)
@pytest.mark.parametrize("name", NOT_DONE)
def test_what_it_does_not_do_goes_as_without_it(name: str, backend: AttnBackend) -> None:
    version, more, dtype, width, call = NOT_DONE[name]
    arguments = {"attention_mask": None, **call}
    query, key, value = tensors(6, 1, 2, 2, width, dtype)
    core = core_of(more.get("attention_backend", backend), 2, width, window_size=more.get("window_size"))
    expected = core(query, key, value, **arguments)
    with installed(**version) as package:
        assert torch.equal(core(query, key, value, **arguments), expected) and not package.calls


def test_dropout_in_training_goes_as_without_it_and_evaluation_does_not() -> None:
    leaves = tensors(6, 1, 2, 2, 8)
    core = core_of(AttnBackend.auto, 2, 8, attention_dropout=0.5)
    with installed() as package, torch.random.fork_rng():
        model_parallel_cuda_manual_seed(1)
        core(*leaves, None)
        assert not package.calls
        core.eval()
        core(*leaves, None)
        assert len(package.calls) == 1


def test_causal_with_fewer_queries_than_keys_goes_as_without_it() -> None:
    query, key, value = tensors(6, 1, 2, 2, 8)
    core = core_of(AttnBackend.auto, 2, 8)
    with installed() as package:
        out = core(query[3:], key, value, None)
        assert not package.calls
    torch.testing.assert_close(out, core(query, key, value, None)[3:], rtol=2e-2, atol=2e-2)


def test_deterministic_only_where_the_signature_has_it() -> None:
    leaves = tensors(6, 1, 2, 2, 8)
    torch.use_deterministic_algorithms(True)
    try:
        with installed() as package:
            core_of(AttnBackend.flash, 2, 8)(*leaves, None)
            assert [call["deterministic"] for call in package.calls] == [True]
        with installed(deterministic=False) as package:
            core_of(AttnBackend.flash, 2, 8)(*leaves, None)
            assert not package.calls
    finally:
        torch.use_deterministic_algorithms(False)
    with installed(deterministic=False) as package:
        core_of(AttnBackend.flash, 2, 8)(*leaves, None)
        assert len(package.calls) == 1


def test_one_that_cannot_be_imported_is_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = tensors(6, 1, 2, 2, 8)

    def broken(package: str, purpose: str) -> ModuleType:
        raise OSError("undefined symbol: of another torch")

    with installed() as package:
        monkeypatch.setattr(flash_attention_3, "require", broken)
        for _ in range(2):
            core_of(AttnBackend.auto, 2, 8)(*leaves, None)
    assert not package.calls
    assert [r.message for r in caplog.records] == [
        "flash_attn_interface cannot be imported (OSError: undefined symbol: of another torch): attention goes on with torch's kernels"
    ]


def test_the_kernel_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    leaves = tensors(6, 1, 2, 2, 8)
    with installed():
        for _ in range(2):
            for backend in (*FLASH_3, AttnBackend.unfused):
                core_of(backend, 2, 8)(*leaves, None)
        core_of(AttnBackend.auto, 2, 8)(*leaves, torch.zeros(1, 1, 6, 6, dtype=torch.bool))
    assert [r.message.removeprefix("attention runs on ") for r in caplog.records] == [
        "FlashAttention-3",
        "torch's matrix products and softmax",
        "torch's scaled_dot_product_attention (auto)",
    ]


def test_flash_has_windows_on_a_gpu_with_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_accelerator", lambda: True)
    windowed: dict[str, Any] = {"window_size": (2, 0)}
    with installed():
        core_of(AttnBackend.flash, 2, 8, **windowed)
        with pytest.raises(ValueError, match=r"attention_backend flash: .* a sliding window, .* without dropout; use auto"):
            core_of(AttnBackend.flash, 2, 8, attention_dropout=0.1, **windowed)
    for version in ({"windows": False}, {"hopper": False}):
        with installed(**version), pytest.raises(ValueError, match="a sliding window"):
            core_of(AttnBackend.flash, 2, 8, **windowed)


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ("--bf16 --attention-dropout 0", False),
        ("--bf16 --attention-dropout 0.1", True),
        ("--attention-dropout 0", True),
        ("--bf16 --attention-dropout 0 --context-parallel-size 2", True),
    ],
)
def test_the_command_line_lets_windows_through_where_the_package_is(monkeypatch: pytest.MonkeyPatch, more: str, refused: bool) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")

    def told() -> bool:
        try:
            checked([*TINY, *f"--window-size 3,0 --attention-backend flash {more}".split()])
        except UsageError as error:
            return "a sliding window" in str(error)
        return False

    with installed():
        assert told() == refused
    assert told()
