"""What the card can do at most: measured in the same process as what is compared with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from escalade.device.gpu import properties_of
from escalade.measure.records import Record
from escalade.measure.timing import Subject, time_interleaved
from escalade.ops.base.dtypes import MULTIPLIED, STORAGE, to_e4m3

MATMUL_SIZE = 8192
COPY_BYTES = 2 << 30
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Ceilings:
    """Properties of a GPU, and the best it was seen to do: medians."""

    gpu: str
    multiprocessors: int
    l2_bytes: int
    shared_bytes: int
    """The most shared memory that one block may ask for."""
    memory_bytes: int
    copy_gbps: float
    """Bytes read plus bytes written."""
    tflops: dict[str, float]
    """TFLOP/s of a large matrix product, by dtype."""

    def floor_us(self, flops: int, bytes_moved: int, dtype: str) -> float:
        """No kernel can be faster: the larger of the operations and the bytes, each at its ceiling."""
        return max(flops / (self.tflops[dtype] * 1e6), bytes_moved / (self.copy_gbps * 1e3))


def measure(device: torch.device, seconds_each: float = 0.3) -> Ceilings:
    """Copies (by a kernel) and matrix products over random data (zeros would be up to 13% faster)."""
    card = properties_of(device)
    products = [_matmul(dtype, device) for dtype in MULTIPLIED]
    if torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY:
        products.append(_fp8_matmul(device))
    subjects = [_copy(device, card.memory_bytes), *products]
    timings = time_interleaved(subjects, device, seconds_each=seconds_each)
    tflops = {
        subject.name: 2 * MATMUL_SIZE**3 / timings[subject.name].median_us / 1e6 for subject in products
    }
    copy_gbps = 2 * _copy_bytes(card.memory_bytes) / timings["copy"].median_us / 1e3
    del subjects, products
    torch.cuda.empty_cache()
    return Ceilings(
        card.name,
        card.multiprocessors,
        card.l2_bytes,
        card.shared_bytes,
        card.memory_bytes,
        copy_gbps,
        tflops,
    )


def _copy_bytes(memory_bytes: int) -> int:
    return min(COPY_BYTES, memory_bytes // 8)


def _copy(device: torch.device, memory_bytes: int) -> Subject:
    source = torch.randn(_copy_bytes(memory_bytes) // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        # A kernel: in a CUDA graph copy_ becomes a memcpy node, which moves little more than half as much.
        torch.neg(source, out=target)

    return Subject("copy", [copy])


def _matmul(dtype: str, device: torch.device) -> Subject:
    size = (MATMUL_SIZE, MATMUL_SIZE)
    a, b = (torch.randn(size, device=device).to(STORAGE[dtype]) for _ in range(2))
    product = torch.empty_like(a)
    return Subject(dtype, [with_matmul_tf32(dtype == "tf32", lambda: torch.mm(a, b, out=product))])


def _fp8_matmul(device: torch.device) -> Subject:
    """PyTorch's product of scaled e4m3 matrices, the second by columns; its result is fp16."""
    size = (MATMUL_SIZE, MATMUL_SIZE)
    a, b = (to_e4m3(torch.randn(size, device=device)) for _ in range(2))
    one = torch.ones((), device=device)

    def multiply() -> None:
        torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float16)

    return Subject("fp8", [multiply])


def with_matmul_tf32(allowed: bool, call: Callable[[], object]) -> Callable[[], None]:
    """The call, with TF32 matrix products switched on or off around it."""

    def run() -> None:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = allowed
        try:
            call()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return run


def records(ceilings: Ceilings) -> list[Record]:
    """The ceilings as records of the workload `ceilings`."""
    copied = _copy_bytes(ceilings.memory_bytes)
    found = [
        Record(
            "ceilings", f"matmul_{MATMUL_SIZE}", dtype, "", 0, "torch", "",
            median_us=2 * MATMUL_SIZE**3 / rate / 1e6, tflops=rate, timing="graph",
        )
        for dtype, rate in ceilings.tflops.items()
    ]  # fmt: skip
    copy = Record(
        "ceilings", f"copy_{copied >> 20}MiB", "fp32", "", 0, "torch", "",
        median_us=2 * copied / ceilings.copy_gbps / 1e3, gbps=ceilings.copy_gbps, timing="graph",
    )  # fmt: skip
    return [copy, *found]
