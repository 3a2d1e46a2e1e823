"""FP8 products that add to an fp32 matrix, by cuBLASLt's own interface: torch._scaled_mm can only overwrite.

The library is the one that torch has loaded. Numbers below are those of cublasLt.h; the interface is stable within CUDA 12 and 13. Plain
twin: product, then sum.
"""

import ctypes
import logging
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache, lru_cache
from typing import Any

import torch

from megatron.core import device
from megatron.core.fp8.formats import E4M3, E5M2
from megatron.core.fp8.quantize import ROW_BLOCKS, TENSOR, Operand, quantized_rows

logger = logging.getLogger(__name__)
WORKSPACE = 32 << 20  # bytes
_R_32F, _COMPUTE_32F = 0, 68
_TYPES = {E4M3: 28, E5M2: 29}
_TRANSA, _A_SCALE, _B_SCALE, _A_SCALE_MODE, _B_SCALE_MODE = 3, 17, 18, 31, 32  # attributes of a product
_SCALE_MODES = {TENSOR: 0, ROW_BLOCKS: 4}
_MAX_WORKSPACE = 1  # attribute of a preference
_TRANSPOSED = 1


class _Choice(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: which kernel to use."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Product:
    """Of [m, k] and [n, k] in given formats with scales of a kind: the library's descriptions, and its choice of a kernel."""

    def __init__(self, m: int, n: int, k: int, left: torch.dtype, right: torch.dtype, kind: str) -> None:
        self.library, self.handle = library, handle = _library()
        # the library's matrices are column-major: out^T [n, m] = b a^T, with b as [k, n] to be transposed
        self.operation, preference = c_void_p(), c_void_p()
        self.a, self.b, self.out = c_void_p(), c_void_p(), c_void_p()
        _check(library.cublasLtMatmulDescCreate(byref(self.operation), c_int(_COMPUTE_32F), c_int(_R_32F)))
        transposed = c_int32(_TRANSPOSED)
        self._set(_TRANSA, transposed)
        if kind != TENSOR:  # the default, and all that older libraries know
            for attribute in (_A_SCALE_MODE, _B_SCALE_MODE):
                self._set(attribute, c_int32(_SCALE_MODES[kind]))
        for place, data_type, rows, columns in (
            (self.a, _TYPES[right], k, n),
            (self.b, _TYPES[left], k, m),
            (self.out, _R_32F, n, m),
        ):
            created = library.cublasLtMatrixLayoutCreate(byref(place), c_int(data_type), c_uint64(rows), c_uint64(columns), c_int64(rows))
            _check(created)
        _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
        size = c_uint64(WORKSPACE)
        _check(library.cublasLtMatmulPreferenceSetAttribute(preference, c_int(_MAX_WORKSPACE), byref(size), c_size_t(8)))
        self.choice, found = _Choice(), c_int(0)
        self._set(_A_SCALE, c_void_p(_workspace().data_ptr()))  # any: that there are scales decides which kernels are considered
        self._set(_B_SCALE, c_void_p(_workspace().data_ptr()))
        _check(
            library.cublasLtMatmulAlgoGetHeuristic(
                handle, self.operation, self.a, self.b, self.out, self.out, preference, c_int(1), byref(self.choice), byref(found)
            )
        )
        library.cublasLtMatmulPreferenceDestroy(preference)
        if not found.value:
            raise RuntimeError("cuBLASLt has no kernel for it")

    def _set(self, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        _check(self.library.cublasLtMatmulDescSetAttribute(self.operation, c_int(attribute), byref(value), size))

    def add(self, out: torch.Tensor, left: Operand, right: Operand) -> None:
        self._set(_A_SCALE, c_void_p(right.inverse.data_ptr()))
        self._set(_B_SCALE, c_void_p(left.inverse.data_ptr()))
        one, workspace = c_float(1.0), _workspace()
        place = c_void_p(out.data_ptr())
        _check(
            self.library.cublasLtMatmul(
                self.handle, self.operation, byref(one), c_void_p(right.data.data_ptr()), self.a, c_void_p(left.data.data_ptr()), self.b,
                byref(one), place, self.out, place, self.out, byref(self.choice), c_void_p(workspace.data_ptr()), c_size_t(WORKSPACE),
                c_void_p(device.stream_handle()),
            )
        )  # fmt: skip

    def __del__(self) -> None:
        self.library.cublasLtMatmulDescDestroy(self.operation)
        for layout in (self.a, self.b, self.out):
            self.library.cublasLtMatrixLayoutDestroy(layout)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt: status {status}")


@cache
def _workspace() -> torch.Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device.current_device())


@cache
def _library() -> tuple[Any, c_void_p]:
    """(the library, its handle). Raises OSError where it is not there."""
    library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
    handle = c_void_p()
    _check(library.cublasLtCreate(byref(handle)))
    return library, handle


@lru_cache(maxsize=256)
def _product(m: int, n: int, k: int, left: torch.dtype, right: torch.dtype, kind: str) -> _Product:
    return _Product(m, n, k, left, right, kind)


def add_product(out: torch.Tensor, a: Operand, b: Operand) -> None:
    """out [m, n] += a [m, k] times b [n, k] transposed; out fp32 and contiguous, k and n multiples of 16, both with one scale each or
    both with a scale for 1 x 128."""
    assert a.kind == b.kind and a.kind in _SCALE_MODES and out.is_contiguous() and out.dtype is torch.float32
    _product(*out.shape, a.data.shape[1], a.data.dtype, b.data.dtype, a.kind).add(out, a, b)


@cache
def works(kind: str) -> bool:
    """Whether the library does it here, and rightly: found out once, said once where it does not. Of 1 x 32 it is not asked."""
    if kind not in _SCALE_MODES:
        return False
    try:
        generator = torch.Generator("cpu").manual_seed(2)
        x, y = (torch.randn(256, 656, generator=generator).to(device.current_device(), torch.bfloat16) for _ in range(2))
        a, b = (quantized_rows(values, dtype, kind) for values, dtype in ((x, E5M2), (y, E4M3)))
        out = torch.full((256, 256), 3.0, device=x.device)
        add_product(out, a, b)
        expected = a.value() @ b.value().t() + 3.0
        error = float((out - expected).abs().max() / expected.abs().max())
        reason = "" if error < 1e-2 else f"results differ by {error:.3g} of the largest"
    except (OSError, RuntimeError, AttributeError) as failure:
        reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
    if reason:
        logger.warning("cuBLASLt does not add FP8 products with scales %s to fp32 (%s): product and sum are apart, slower", kind, reason)
    return not reason
