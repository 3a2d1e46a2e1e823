"""FP8 products by cuBLASLt's own interface, which can add to an fp32 matrix, as torch._scaled_mm cannot. The library's descriptions of a
product and its choice of a kernel are kept, by sizes: so a product costs the host no more than through torch, 35 us.

The library is the one that torch has loaded. Numbers below are those of cublasLt.h; the interface is stable within CUDA 12 and 13. Plain
twin: gemm.product_plain, then the sum.
"""

import ctypes
import logging
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from megatron.core import device
from megatron.core.fp8.formats import E4M3, E5M2
from megatron.core.fp8.quantize import ROW_BLOCKS, SQUARE_BLOCKS, TENSOR, Operand
from megatron.core.fp8.trials import difference, trial

logger = logging.getLogger(__name__)
WORKSPACE = 32 << 20  # bytes, of each stream
_R_32F, _COMPUTE_32F = 0, 68
_TYPES = {E4M3: 28, E5M2: 29}
_OUTPUTS = {torch.float32: _R_32F, torch.float16: 2, torch.bfloat16: 14}
_TRANSA, _A_SCALE, _B_SCALE, _A_SCALE_MODE, _B_SCALE_MODE = 3, 17, 18, 31, 32  # attributes of a product
_SCALE_MODES = {TENSOR: 0, ROW_BLOCKS: 4, SQUARE_BLOCKS: 5}
_MAX_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)  # attributes of a preference, the latter of a, b, what is added to, and the result
_TRANSPOSED = 1
_ALIGNED = 256  # bytes: what the library takes for granted of the matrices unless it is told


class _Choice(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: which kernel to use."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Side(NamedTuple):
    """What the choice of a kernel depends on, of an operand but for its sizes."""

    dtype: torch.dtype
    kind: str


class _Product:
    """Of [m, k] and [n, k] in given formats with scales of given kinds: the library's descriptions, and its choice of a kernel."""

    def __init__(
        self, library: Any, handle: c_void_p, m: int, n: int, k: int, left: _Side, right: _Side, out_dtype: torch.dtype, alignment: int
    ) -> None:
        self.library, self.handle = library, handle
        # the library's matrices are column-major: out^T [n, m] = b a^T, with b as [k, n] to be transposed
        self.operation, preference = c_void_p(), c_void_p()
        self.a, self.b, self.out = c_void_p(), c_void_p(), c_void_p()
        _check(library.cublasLtMatmulDescCreate(byref(self.operation), c_int(_COMPUTE_32F), c_int(_R_32F)))
        self._set(_TRANSA, c_int32(_TRANSPOSED))
        for attribute, side in ((_A_SCALE_MODE, right), (_B_SCALE_MODE, left)):
            if side.kind != TENSOR:  # the default, and all that older libraries know
                self._set(attribute, c_int32(_SCALE_MODES[side.kind]))
        for place, data_type, rows, columns in (
            (self.a, _TYPES[right.dtype], k, n),
            (self.b, _TYPES[left.dtype], k, m),
            (self.out, _OUTPUTS[out_dtype], n, m),
        ):
            created = library.cublasLtMatrixLayoutCreate(byref(place), c_int(data_type), c_uint64(rows), c_uint64(columns), c_int64(rows))
            _check(created)
        _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
        wishes = (_MAX_WORKSPACE, c_uint64(WORKSPACE)), *((attribute, c_uint32(alignment)) for attribute in _ALIGNMENTS)
        for attribute, value in wishes:
            size = c_size_t(ctypes.sizeof(value))
            _check(library.cublasLtMatmulPreferenceSetAttribute(preference, c_int(attribute), byref(value), size))
        self.choice, found = _Choice(), c_int(0)
        somewhere = c_void_p(_workspace(device.stream_handle()).data_ptr())
        for attribute in (_A_SCALE, _B_SCALE):  # that there are scales decides which kernels are considered
            self._set(attribute, somewhere)
        status = library.cublasLtMatmulAlgoGetHeuristic(
            handle, self.operation, self.a, self.b, self.out, self.out, preference, c_int(1), byref(self.choice), byref(found)
        )
        library.cublasLtMatmulPreferenceDestroy(preference)
        if status or not found.value:
            asked = f"[{m}, {k}] of {left} times [{n}, {k}] of {right} in {out_dtype}, {alignment} bytes aligned"
            raise RuntimeError(f"cuBLASLt has no kernel for {asked}: status {status}")

    def _set(self, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        _check(self.library.cublasLtMatmulDescSetAttribute(self.operation, c_int(attribute), byref(value), size))

    def write(self, out: torch.Tensor, left: Operand, right: Operand, add: bool) -> None:
        self._set(_A_SCALE, c_void_p(right.inverse.data_ptr()))
        self._set(_B_SCALE, c_void_p(left.inverse.data_ptr()))
        stream = device.stream_handle()
        a, b, place = (c_void_p(tensor.data_ptr()) for tensor in (right.data, left.data, out))
        _check(
            self.library.cublasLtMatmul(
                self.handle, self.operation, _ONE, a, self.a, b, self.b, _ONE if add else _ZERO, place, self.out, place, self.out,
                byref(self.choice), c_void_p(_workspace(stream).data_ptr()), c_size_t(WORKSPACE), c_void_p(stream),
            )
        )  # fmt: skip

    def __del__(self) -> None:
        self.library.cublasLtMatmulDescDestroy(self.operation)
        for layout in (self.a, self.b, self.out):
            self.library.cublasLtMatrixLayoutDestroy(layout)


_ONE, _ZERO = byref(c_float(1.0)), byref(c_float(0.0))


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt: status {status}")


@cache
def _workspace(stream: int) -> torch.Tensor:
    """A stream's own: kernels of two streams may run at the same time."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device.current_device())


@cache
def _library() -> tuple[Any, c_void_p]:
    """(the library, its handle). Raises OSError where it is not there."""
    # its calls are short: Python's lock is kept, not handed to another thread each time
    library = ctypes.PyDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
    handle = c_void_p()
    _check(library.cublasLtCreate(byref(handle)))
    return library, handle


@lru_cache(maxsize=4096)  # experts have any number of blocks of rows
def _product(m: int, n: int, k: int, left: _Side, right: _Side, out_dtype: torch.dtype, alignment: int) -> _Product:
    return _Product(*_library(), m, n, k, left, right, out_dtype, alignment)


def write_product(out: torch.Tensor, a: Operand, b: Operand, *, add: bool) -> None:
    """out [m, n] = or, of fp32 to `add`, += a [m, k] times b [n, k] transposed: sizes and kinds of scales as gemm says, all contiguous."""
    assert out.is_contiguous() and (out.dtype is torch.float32 or not add)
    places = out.data_ptr() | a.data.data_ptr() | b.data.data_ptr()
    alignment = min(places & -places, _ALIGNED)  # the largest power of two that all are multiples of
    sides = _Side(a.data.dtype, a.kind), _Side(b.data.dtype, b.kind)
    _product(*out.shape, a.data.shape[1], *sides, out.dtype, alignment).write(out, a, b, add)


@cache
def works(kind_a: str, kind_b: str, out_dtype: torch.dtype) -> bool:
    """Whether the library does it here, and rightly: found out once, said once where it does not. Of 1 x 32 it is not asked."""
    if not {kind_a, kind_b} <= _SCALE_MODES.keys() or out_dtype not in _OUTPUTS:
        return False
    try:
        a, b = trial(kind_a, kind_b)
        out = torch.full((len(a.data), len(b.data)), torch.nan, dtype=out_dtype, device=a.data.device)
        write_product(out, a, b, add=False)
        reason = difference(out, a, b)
        if out_dtype is torch.float32 and not reason:
            write_product(out, a, b, add=True)
            reason = difference(out / 2, a, b) and "it does not add"
    except (OSError, RuntimeError, AttributeError) as failure:
        reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
    if reason:
        kinds = f"{kind_a} times {kind_b} in {out_dtype}"
        logger.warning("cuBLASLt does not do FP8 products with scales %s (%s): others do, more slowly, and sums apart", kinds, reason)
    return not reason
