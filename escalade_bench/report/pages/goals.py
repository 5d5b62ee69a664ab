"""The tables of docs/goals.md: plans written down before the first kernel, what was expected and what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from escalade import ops
from escalade_bench.campaign.ladders import FEATURED
from escalade_bench.campaign.ladders import TRAFFIC as WALL_RUNGS
from escalade_bench.measure.figures import fastest
from escalade_bench.measure.records import Record
from escalade_bench.networks.op_times import FORMS, OPERATION
from escalade_bench.peers.comparison import TRAINING_STEP
from escalade_bench.profile.climb import SUFFIX as TRAFFIC
from escalade_bench.report import cells
from escalade_bench.report.compare import of
from escalade_bench.report.document import Heading, Item, origin
from escalade_bench.report.pages.networks import OpTimes, Variant, milliseconds, op_times
from escalade_bench.report.table import Column, Table, columns

# --- a convolution and the wall of memory

_OPERANDS, _OPERATIONS = 8, 2
"""Bytes of both operands of a multiply-add in fp32, and the operations that it counts as."""


def _counted(heading: str, name: str, unit: float | None = None) -> Column:
    """Return a column of a counter in a unit, or per microsecond of the record's time."""

    def cell(r: Record) -> str:
        return "" if r.config[name] is None else cells.whole(r.config[name] / (unit or r.time * 1e3))

    return Column(heading, cell)


WALL_COLUMNS = [
    *columns("dtype|rung|GFLOP/s|% of ceiling"),
    _counted("fewest MB", "fewest_bytes", 1e6),
    _counted("MB moved", "moved_bytes", 1e6),
    Column("times the fewest", lambda r: cells.quotient(r.config["moved_bytes"], r.config["fewest_bytes"])),
    _counted("GB/s of memory", "moved_bytes"),
    Column("% of its peak", lambda r: cells.written("{:.1f}", r.config["dram_pct"])),
    _counted("GB/s of L2", "l2_bytes"),
    *columns("what it does=note"),
]


def _wall(records: Sequence[Record]) -> Iterator[Item]:
    own = [r for r in of(records, "conv2d" + TRAFFIC) if r.problem == FEATURED and r.median_us]
    known = {(r.dtype, r.rung): r for r in own}
    order = ((t, rung) for (_, p, t), rungs in WALL_RUNGS.items() for rung in rungs if p == FEATURED)
    rows = [known[key] for key in order if key in known]
    if rows:
        yield origin(own)
        yield from _wall_sentence(records, rows[0])
        yield Table(WALL_COLUMNS, rows)


def _copy_gbps(records: Sequence[Record]) -> float | None:
    rates = [r.gbps for r in of(records, "ceilings") if r.problem.startswith("copy") and r.gbps]
    return rates[0] if rates else None


def _wall_sentence(records: Sequence[Record], naive: Record) -> Iterator[str]:
    """Compare the naive rung with the limit of memory without caches."""
    copy, moved = _copy_gbps(records), naive.config["moved_bytes"]
    if copy and moved is not None and naive.tflops is not None:
        asked = naive.tflops * 1e6 * naive.time / _OPERATIONS * _OPERANDS
        yield (
            f"Without caches `{naive.rung}` would move {asked / 1e9:,.0f} GB, {_OPERANDS} bytes per multiply-add, and "
            f"at the rate of a copy ({copy:,.0f} GB/s) reach {copy / _OPERANDS * _OPERATIONS:,.0f} GFLOP/s at most. It "
            f"moves {moved / 1e9:,.2f} GB and reaches {cells.gflops(naive)}: caches serve "
            f"{100 * (1 - moved / asked):.1f}% of its requests. The limit is not memory but the requests themselves; "
            "fewer of them per multiply-add, by reuse in registers, is what gets past it."
        )


# --- a LeNet's convolutions: unrolled, fused, tuned

_UNROLLED, _APART, _FUSED = "matrix_unroll", "tensor_cores", "fusion"
_PRODUCTS = {"fp32": "tf32", "fp16": "fp16"}
"""Dtype of the tensor cores' products, by that of the tensors."""


def _lenet(records: Sequence[Record]) -> Iterator[Item]:
    """Show the gain of fusion alone per dtype, with the faster of two rungs by one name."""
    for times in (found for found in op_times(of(records, OPERATION)) if not found.form):
        ours = sorted((one for one in times.variants if not one.first.is_peer), key=lambda one: -one.sum)
        known = {one.name.removesuffix(" (TF32)"): one for one in ours}
        if _APART in known and _FUSED in known:
            title = f"{times.storage} tensors, {times.batch:,} images"
            yield _fusion_alone(known[_APART], known[_FUSED], times, _copy_gbps(records)).titled(title, 0)
    counted = [r for r in of(records, OPERATION + TRAFFIC) if r.median_us]
    if counted:
        title = "The fused kernels, counted by Nsight Compute"
        yield Table([*columns("problem|µs"), *WALL_COLUMNS], counted, title=title)


def _fusion_alone(apart: Variant, fused: Variant, times: OpTimes, copy_gbps: float | None) -> Table:
    """Show the gain of fusion alone, and its upper bound."""
    operation = ops.operation(OPERATION)
    rung = operation.ladder.rung(_UNROLLED)
    rows = []
    for number, (name, one, other) in enumerate(zip(FORMS[""], apart.records, fused.records, strict=True)):
        problem = replace(operation.parse(name.format(batch=times.batch)), dtype=_PRODUCTS[times.storage])
        # The unrolled matrix and its product, written and read once.
        moved = 2 * sum(each.bytes for each in rung.recipe(problem, rung.configs(problem)[0]).workspaces)
        copied = milliseconds(moved / copy_gbps / 1e3) if copy_gbps else ""
        took = milliseconds(one.time), milliseconds(other.time), cells.times(one.time / other.time)
        rows.append((number + 1, problem.filters, *took, f"{moved / 1e9:.1f} GB", copied, (one, other)))
    return Table.of(
        "convolution|filters|>tensor_cores: matrix in memory|>fusion|>fusion alone|>matrix and product, both ways|"
        ">a copy of as much",
        rows,
    )


# --- an autoencoder's training: ten ideas

TRAINED = "autoencoder"


@dataclass(frozen=True)
class Idea:
    """An idea, and where it is measured: two rungs of one workload and problem, in fp32."""

    what: str
    predicted: tuple[float, float]
    workload: str
    problem: str
    rungs: tuple[str, ...]
    """The rungs that have the idea; the fastest counts."""
    over: str
    """The rung that differs from them only by the idea."""
    note: str = ""

    def row(self, records: Sequence[Record]) -> tuple[object, ...]:
        own = [r for r in of(records, self.workload) if (r.problem, r.dtype) == (self.problem, "fp32")]
        with_it = fastest(r for r in own if r.rung in self.rungs)
        without = fastest(r for r in own if r.rung == self.over)
        where = f"{self.workload} {self.problem}: {', '.join(self.rungs)} over {self.over}"
        noted = "; ".join(filter(None, (where, self.note)))
        gain = without.time / with_it.time if with_it and without else None
        return _idea(self.what, self.predicted, gain, noted, (with_it, without))


def _idea(
    what: str,
    predicted: tuple[float, float],
    gain: float | None,
    where: str,
    records: Sequence[Record | None],
) -> tuple[object, ...]:
    low, high = predicted
    verdict = "" if gain is None else "less" if gain < low else "more" if gain > high else "as predicted"
    return what, f"{low:g}–{high:g}×", cells.times(gain) or "not yet", verdict, where, records


IDEAS = (
    Idea("max pooling: tiles in shared memory", (1.5, 2.0), "max_pool2d", "64_112_k3s2p1_b256", ("shared_tile",),
         "naive", note="windows of 3×3 that overlap; those of the autoencoder do not, and share nothing"),
    Idea("max pooling, backward: sums in shared memory, not by atomics", (2.0, 3.0), "max_pool2d_backward",
         "256_32_k2s2_b256_mask", ("shared_sums",), "atomics"),
    Idea("upsampling: coalesced, 16 bytes per thread", (1.3, 1.5), "upsample2d", "64_56to112_b32_nearest",
         ("packs", "vectorised"), "naive"),
    Idea("upsampling, backward: tiles in shared memory", (1.2, 1.4), "upsample2d_backward", "256_16to32_b256_nearest",
         ("shared_tile",), "per_pixel"),
    Idea("convolution, backward: sums in shared memory, not by atomics", (1.5, 2.0), "conv2d_weight_gradient",
         "256to128_16_k3s1_b256_bias", ("shared_sums",), "atomics"),
    Idea("weights and bias in constant memory", (1.1, 1.2), "conv2d", "3to64_224_k7s2_b256", ("constant_weights",),
         "input_tile"),
    Idea("pinned memory for transfers", (1.2, 1.5), "lenet_stream", "86_b2500_uint8", ("stream, pinned",),
         "stream, pageable"),
    Idea("convolution, bias and ReLU in one kernel", (1.3, 1.5), "resnet18_phases", "224_b1", ("optimised",), "graph",
         "BatchNorm folded besides"),
    Idea("16 bytes per access: ReLU", (1.2, 1.3), "relu", "relu_51380224", ("vectorised",), "naive"),
    Idea("16 bytes per access: ReLU, backward", (1.2, 1.3), "relu", "relu_backward_51380224", ("vectorised",), "naive"),
    Idea("16 bytes per access: upsampling, backward", (1.2, 1.3), "upsample2d_backward", "256_16to32_b256_nearest",
         ("rows", "vectorised"), "per_pixel"),
    Idea("16 bytes per access: mean squared error", (1.2, 1.3), "pointwise_loss",
         "mean_33554432[t0=x-target;t0*t0,2*t0]_gradient", ("vectorised",), "single"),
)  # fmt: skip


def _pool(records: Sequence[Record]) -> tuple[object, ...]:
    """The memory of PyTorch's CUDA graph over ours, of the largest fp32 step that both were measured on."""
    own = [r for r in of(records, TRAINED + TRAINING_STEP) if r.peak_bytes and r.dtype == "fp32"]
    theirs = {r.batch: r for r in own if r.system == "torch-graph"}
    both = [(r, theirs[r.batch]) for r in own if not r.is_peer and r.batch in theirs]
    ours, peer = max(both, key=lambda pair: pair[0].batch, default=(None, None))
    gain = (peer.peak_bytes or 0) / (ours.peak_bytes or 1) if ours and peer else None
    size = f", batch {ours.batch:,}" if ours else ""
    where = f"training step of {TRAINED} in fp32{size}: peak memory of PyTorch's CUDA graph over ours"
    return _idea("memory that is used again", (1.1, 1.2), gain, where, (ours, peer))


def _ideas(records: Sequence[Record]) -> Iterator[Item]:
    rows = [*(idea.row(records) for idea in IDEAS), _pool(records)]
    if any(row[3] for row in rows):
        yield Table.of("idea|predicted|>gain|that is|where", rows)


_GOALS = {
    "wall": ("A convolution and the wall of memory", _wall),
    "lenet": ("A LeNet's convolutions: unrolled, fused, tuned", _lenet),
    "ideas": ("An autoencoder's training: ten ideas", _ideas),
}
"""The generated parts of the page, by their markers: a title for the HTML page, and the tables."""


def blocks(records: Sequence[Record]) -> dict[str, list[Item]]:
    return {
        name: list(make(records)) or ["It has not been measured yet."] for name, (_, make) in _GOALS.items()
    }


def page(records: Sequence[Record]) -> list[Item]:
    """All parts below their titles."""
    found = blocks(records)
    return [item for name, (title, _) in _GOALS.items() for item in (Heading(2, title), *found[name])]
