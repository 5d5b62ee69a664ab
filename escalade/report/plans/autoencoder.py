"""The plan for an autoencoder's training, idea by idea: the gain that it predicts, and the one that was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from escalade.bench.peers.comparison import TRAINING_STEP
from escalade.measure.records import Record
from escalade.report import cells
from escalade.report.markdown import table
from escalade.report.plans.section import Section

TRAINED = "autoencoder"
_NOT_YET = "not yet"
_ABOUT = """The plan has ten ideas, each with the gain that it predicts for its kernel. Measured is the rung that has
the idea over the one that has not, on the same problem in fp32, each in its faster layout; of pinned memory a stream of
images from it over one from pageable memory; of fusion a network with its epilogues fused over the same kernels one by
one in a CUDA graph; of memory that is used again what a step of training allocates at most, beside PyTorch's."""


@dataclass(frozen=True)
class Idea:
    """An idea of the plan, and where it was measured: two rungs of one workload and problem."""

    what: str
    predicted: tuple[float, float]
    workload: str
    problem: str
    rungs: tuple[str, ...]
    """The rungs that have the idea; the fastest counts."""
    over: str
    unit: str = ""
    """The unit of `escalade measure`, where it is not the ladder's."""
    note: str = ""

    @property
    def measured_by(self) -> str:
        return self.unit or f"ladder/{self.workload}/{self.problem}/fp32"

    def gain(self, records: Sequence[Record]) -> float | None:
        own = [
            r for r in records if (r.workload, r.problem, r.dtype) == (self.workload, self.problem, "fp32")
        ]
        with_it = [r.time for r in own if r.rung in self.rungs and r.median_us is not None]
        without = [r.time for r in own if r.rung == self.over and r.median_us is not None]
        return min(without) / min(with_it) if with_it and without else None


IDEAS = (
    Idea("max pooling: tiles in shared memory", (1.5, 2.0), "max_pool2d", "64_112_k3s2p1_b256", ("shared_tile",),
         "naive", note="windows of 3×3 that overlap; those of the autoencoder do not, and share nothing"),
    Idea("max pooling, backward: sums in shared memory, not by atomics", (2.0, 3.0), "max_pool2d_backward",
         "256_32_k2s2_b256_mask", ("shared_sums",), "atomics"),
    Idea("upsampling: coalesced, 16 bytes a thread", (1.3, 1.5), "upsample2d", "64_56to112_b32_nearest",
         ("runs", "vectorised"), "naive"),
    Idea("upsampling, backward: tiles in shared memory", (1.2, 1.4), "upsample2d_backward", "256_16to32_b256_nearest",
         ("shared_tile",), "per_pixel"),
    Idea("convolution, backward: sums in shared memory, not by atomics", (1.5, 2.0), "conv2d_weight_gradient",
         "256to128_16_k3s1_b256_bias", ("shared_sums",), "atomics"),
    Idea("weights and bias in constant memory", (1.1, 1.2), "conv2d", "3to64_224_k7s2_b256", ("constant_weights",),
         "input_tile"),
    Idea("pinned memory for transfers", (1.2, 1.5), "lenet_stream", "86_b2500_uint8", ("stream, pinned",),
         "stream, pageable", "network/lenet/stream/fp32"),
    Idea("convolution, bias and ReLU in one kernel", (1.3, 1.5), "resnet18_phases", "224_b1", ("optimised",), "graph",
         "network/resnet18/phases/fp32", "BatchNorm folded besides"),
    Idea("16 bytes an access: ReLU", (1.2, 1.3), "relu", "relu_51380224", ("vectorised",), "naive"),
    Idea("16 bytes an access: ReLU, backward", (1.2, 1.3), "relu", "relu_backward_51380224", ("vectorised",), "naive"),
    Idea("16 bytes an access: upsampling, backward", (1.2, 1.3), "upsample2d_backward", "256_16to32_b256_nearest",
         ("rows", "vectorised"), "per_pixel"),
    Idea("16 bytes an access: mean squared error", (1.2, 1.3), "pointwise_loss",
         "mean_33554432[t0=x-target;t0*t0,2*t0]_gradient", ("vectorised",), "single"),
)  # fmt: skip
POOL = ("memory that is used again", (1.1, 1.2), f"network/{TRAINED}/training-step/*/fp32")
"""Another idea, which is no rung's: what was predicted of it, and the units that measure it."""


def _block(records: Sequence[Record]) -> str:
    rows = [_row(idea, idea.gain(records)) for idea in IDEAS]
    what, predicted, _ = POOL
    memory = next(_memory(records), None)
    share = f"{cells.share(memory)} of PyTorch's memory" if memory else _NOT_YET
    rows.append((what, _range(predicted), share, "", f"a step of training of {TRAINED}"))
    if not any(idea.gain(records) for idea in IDEAS) and memory is None:
        return ""
    return table(("idea", "predicted", "measured", "that is", "on"), rows, left=5)


def _row(idea: Idea, gain: float | None) -> tuple[str, ...]:
    where = f"`{idea.workload}` `{idea.problem}`: {', '.join(idea.rungs)} over {idea.over}"
    note = f"; {idea.note}" if idea.note else ""
    return (
        idea.what,
        _range(idea.predicted),
        cells.times(gain) or _NOT_YET,
        _verdict(idea, gain),
        where + note,
    )


def _range(predicted: tuple[float, float]) -> str:
    low, high = predicted
    return f"{low:g}–{high:g}×"


def _verdict(idea: Idea, gain: float | None) -> str:
    low, high = idea.predicted
    if gain is None:
        return ""
    return "less" if gain < low else "more" if gain > high else "as predicted"


def _memory(records: Sequence[Record]) -> Iterator[float]:
    """What a step allocates, beside what PyTorch's does in the same comparison."""
    own = [r for r in records if r.workload == TRAINED + TRAINING_STEP and r.peak_bytes]
    for ours in (r for r in own if not r.is_peer):
        for peer in (r for r in own if r.system == "torch-graph" and r.comparison == ours.comparison):
            if ours.peak_bytes and peer.peak_bytes:
                yield ours.peak_bytes / peer.peak_bytes


SECTION = Section(
    "An autoencoder's training: ten ideas",
    _ABOUT,
    "escalade measure " + " ".join(f"'{idea.measured_by}'" for idea in IDEAS) + f" '{POOL[2]}'",
    _block,
)
