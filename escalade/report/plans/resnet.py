"""ResNet-18 from loops on a CPU to an engine on a GPU: what such a plan measures at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from escalade.bench.networks import cpu, layer_kinds
from escalade.bench.networks.evaluation import SUFFIX as EVALUATION
from escalade.measure.records import Record
from escalade.report import cpu_pages, evaluation_pages
from escalade.report.commits import newest
from escalade.report.markdown import origin, table
from escalade.report.network_pages import phase_table
from escalade.report.plans.section import Section

NETWORK = "resnet18"
PHASES = "_phases"
_BENCH = f"escalade bench {NETWORK} --parts {{part}} -t fp32,fp16 --results results"
_PHASES = """One image from host memory to logits there: plain loops, PyTorch on one thread, the copies alone,
convolutions and BatchNorm on the GPU with everything else where it was, all layers there, and the engine. As long as
some layers stay on the CPU, an image goes back and forth for each of the others."""
_BATCHES = """The CPU has PyTorch's operators in fp32 on all its cores, the GPU the engine in the dtype of the row: a
replay of its CUDA graph, and a call from pinned memory to results there. Memory is the plan's, weights included."""
_KINDS = """One image. The CPU has PyTorch's operators on one thread, the GPU a kernel for every operation, by the rung
that is chosen for it and timed by itself over warm caches; `total` is the network in one go, on the GPU as one CUDA
graph. The engine fuses most of these into the convolutions."""
_EVALUATION = """Top-1 and top-5 on labelled photographs, with weights that are no part of this project. In every dtype
the answers should be those of PyTorch in fp32: that a few images can tell, how good a network is only thousands. FP8's
ranges are those of the first batch."""


def _of(suffix: str, made: Callable[[Sequence[Record]], str], records: Sequence[Record]) -> str:
    """The newest records of a part, with where they come from; nothing where there are none."""
    own = newest([r for r in records if r.workload == NETWORK + suffix])
    return f"{origin(own)}\n{made(own)}" if own else ""


def _batches(records: Sequence[Record]) -> str:
    note = next((r.note for r in records if r.is_peer), "")
    rows = table(cpu_pages.BATCHES, cpu_pages.batch_rows(records), left=cpu_pages.TEXTS)
    return f"CPU: {note}.\n\n{rows}"


def _kinds(records: Sequence[Record]) -> str:
    return table(cpu_pages.LAYERS, cpu_pages.layer_rows(records), left=cpu_pages.TEXTS)


def _evaluation(records: Sequence[Record]) -> str:
    weights = sorted({r.config["weights"] for r in records})
    named = ", ".join(f"`{name}`" for name in weights)
    return f"Weights: {named}. {evaluation_pages.LEGEND}\n{evaluation_pages.markdown_table(records)}"


SECTIONS = (
    Section("ResNet-18: the CPU and the GPU, by batch", _BATCHES, _BENCH.format(part=cpu.PART),
            partial(_of, cpu.SUFFIX, _batches)),
    Section("ResNet-18: by kind of layer", _KINDS, _BENCH.format(part=layer_kinds.PART),
            partial(_of, layer_kinds.SUFFIX, _kinds)),
    Section("ResNet-18: one image, phase by phase", _PHASES, _BENCH.format(part="phases"),
            partial(_of, PHASES, phase_table)),
    Section("ResNet-18: right answers with real weights", _EVALUATION,
            "escalade evaluate resnet18 --weights WEIGHTS --data FOLDER --classes FILE --results results",
            partial(_of, EVALUATION, _evaluation)),
)  # fmt: skip
