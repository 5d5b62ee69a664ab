"""Ceilings of the card, measured in the same process as the figures that are compared with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from escalade.device.gpu import properties_of
from escalade.device.timing import Subject, time_interleaved
from escalade.ops.base.dtypes import MULTIPLIED, STORAGE, to_e4m3
from escalade_bench.measure.records import Record

PRODUCTS = ((8192, 8192, 8192), (4096, 4096, 4096), (16384, 2048, 4096), (50176, 256, 2304))
"""Rows, columns and depth of the matrix products to time: large ones, a deep one, a convolution's. Which one is fastest
depends on the clock that the card sustains."""
COPY_BYTES = 2 << 30
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Ceilings:
    """Properties of a GPU, and its best measured rates (medians)."""

    gpu: str
    multiprocessors: int
    l2_bytes: int
    shared_bytes: int
    """Largest shared memory per CTA."""
    memory_bytes: int
    copy_gbps: float
    """GB/s of a copy: bytes read plus bytes written."""
    read_gbps: float
    """GB/s of a sum: bytes read."""
    tflops: dict[str, float]
    """TFLOP/s of the fastest of several matrix products, by dtype."""
    conditions: dict[str, Any] = field(default_factory=dict)
    """State of the card meanwhile: see `escalade.device.nvml.GpuConditions`."""

    def peak(self, dtype: str) -> float:
        """Return the TFLOP/s of products. Tensor cores multiply FP8 and INT8 at the same rate, and PyTorch's product
        in FP8 is faster than its product in INT8."""
        return self.tflops["fp8" if dtype == "int8" else dtype]

    def floor_us(self, flops: int, bytes_moved: int, dtype: str) -> float:
        """Return the lower bound on time: the larger of operations and bytes, each at its ceiling.

        In fp32 operations give no bound: split operands use tensor cores, and Winograd and FFTs need fewer operations.
        In TF32 operands may be rounded to fp16 and multiplied at its rate.
        """
        moving = bytes_moved / (max(self.copy_gbps, self.read_gbps) * 1e3)
        if dtype == "fp32":
            return moving
        rate = max(map(self.peak, ("tf32", "fp16"))) if dtype == "tf32" else self.peak(dtype)
        return max(moving, flops / (rate * 1e6))


def measure(device: torch.device, seconds_each: float = 0.1) -> Ceilings:
    """Time copies (by a kernel), sums and matrix products over random data (zeros would be up to 13% faster)."""
    card = properties_of(device)
    dtypes = [*MULTIPLIED]
    if torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY:
        dtypes.append("fp8")
    products = {
        _product_name(dtype, shape): (_fp8_matmul if dtype == "fp8" else _matmul)(dtype, shape, device)
        for dtype in dtypes
        for shape in PRODUCTS
    }
    subjects = [*_passes(device, card.memory_bytes), *products.values()]
    times = time_interleaved(subjects, device, seconds_each=seconds_each)
    del subjects, products
    torch.cuda.empty_cache()
    tflops = {
        dtype: max(2 * math.prod(s) / times[_product_name(dtype, s)].median_us / 1e6 for s in PRODUCTS)
        for dtype in dtypes
    }
    size = _copy_bytes(card.memory_bytes)
    copied, read = (passes * size / times[name].median_us / 1e3 for name, passes in (("copy", 2), ("sum", 1)))
    own = card.name, card.multiprocessors, card.l2_bytes, card.shared_bytes, card.memory_bytes
    return Ceilings(*own, copied, read, tflops, times["copy"].record)


def _product_name(dtype: str, shape: tuple[int, int, int]) -> str:
    return f"{dtype} {'x'.join(map(str, shape))}"


def _copy_bytes(memory_bytes: int) -> int:
    return min(COPY_BYTES, memory_bytes // 8)


def _passes(device: torch.device, memory_bytes: int) -> list[Subject]:
    """Return the subjects for memory bandwidth: a copy and a sum."""
    source = torch.randn(_copy_bytes(memory_bytes) // 4, device=device)
    target, total = torch.empty_like(source), torch.empty((), device=device)

    def copy() -> None:
        # A kernel, because in a CUDA graph copy_ becomes a memcpy node, which reaches little more than half the
        # bandwidth.
        torch.neg(source, out=target)

    def read() -> None:
        torch.sum(source, dim=0, out=total)

    return [Subject("copy", [copy]), Subject("sum", [read])]


def _matmul(dtype: str, shape: tuple[int, int, int], device: torch.device) -> Subject:
    rows, columns, depth = shape
    a, b = (torch.randn(size, device=device).to(STORAGE[dtype]) for size in ((rows, depth), (depth, columns)))
    product = torch.empty(rows, columns, dtype=a.dtype, device=device)
    call = with_matmul_tf32(dtype == "tf32", lambda: torch.mm(a, b, out=product))
    return Subject(_product_name(dtype, shape), [call])


def _fp8_matmul(dtype: str, shape: tuple[int, int, int], device: torch.device) -> Subject:
    """PyTorch's product of scaled e4m3 matrices, the second column-major; its result is fp16."""
    rows, columns, depth = shape
    a, b = (to_e4m3(torch.randn(size, device=device)) for size in ((rows, depth), (columns, depth)))
    one = torch.ones((), device=device)

    def multiply() -> None:
        torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float16)

    return Subject(_product_name(dtype, shape), [multiply])


def with_matmul_tf32(allowed: bool, call: Callable[[], object]) -> Callable[[], None]:
    """Return the call with TF32 matrix products switched on or off around it."""

    def run() -> None:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = allowed
        try:
            call()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return run


def records(ceilings: Ceilings) -> list[Record]:
    """Return the ceilings as records of the workload `ceilings`."""

    def record(problem: str, dtype: str, **rate: float) -> Record:
        blank = Record("ceilings", problem, dtype, "", 0, "torch", "", timing="graph")
        return replace(blank, conditions=ceilings.conditions, **rate)  # type: ignore[arg-type]

    mebibytes = _copy_bytes(ceilings.memory_bytes) >> 20
    passes = {"copy": ceilings.copy_gbps, "sum": ceilings.read_gbps}
    return [
        *(record(f"{name}_{mebibytes}MiB", "fp32", gbps=rate) for name, rate in passes.items()),
        *(record("matmul", dtype, tflops=rate) for dtype, rate in ceilings.tflops.items()),
    ]
