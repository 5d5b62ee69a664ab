"""A LeNet on 10,000 gray images: its convolutions one by one, the whole network, and its accuracy on Fashion-MNIST."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from escalade import models
from escalade.engine.engine import Engine
from escalade_bench.measure.records import Record
from escalade_bench.networks import fashion_mnist, op_times, parts, planned
from escalade_bench.networks.judging import Standard, fresh, standard
from escalade_bench.networks.workload import Part, Say, Setting, Stream, Workload, reference
from escalade_bench.peers import registry
from escalade_bench.peers.network import tensors

COUNTS = (100, 1_000, 10_000)
_COUNTS_ON_CPU = (100,)
_STREAM_BATCHES = (2_500, 10_000)
_AS_IT_IS = ((0.0,), (1 / 255,))
"""A normalization that leaves gray values unchanged."""


def _model(size: int, seed: int) -> nn.Module:
    weights = fashion_mnist.find(fashion_mnist.WEIGHTS)
    return models.LeNet() if weights is None else models.load_lenet(weights)


def _images(count: int, size: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return Fashion-MNIST's images, repeated if there are too few; random gray values without them."""
    found = fashion_mnist.clothes(min(count, fashion_mnist.COUNT))
    if found is None:
        generator = torch.Generator(device).manual_seed(seed)
        gray = torch.randint(0, 256, (count, 1, size, size), generator=generator, device=device)
        return gray.float()
    rows = torch.arange(count) % len(found.images)
    return found.images[rows].to(device).float()


def _notice() -> str:
    absent = fashion_mnist.missing()
    if not absent:
        return ""
    where = ", ".join(map(str, fashion_mnist.folders()))
    return (
        f"{', '.join(absent)} (or .gz): in none of {where}; ESCALADE_DATA names another folder. Random data is used "
        "instead, and there is no accuracy on Fashion-MNIST."
    )


def _accuracy(setting: Setting, say: Say) -> Iterator[list[Record]]:
    """Measure the accuracy on Fashion-MNIST; without it, the error against float64."""
    if fashion_mnist.missing():
        yield from parts.accuracy(setting, say)
        return
    counts = COUNTS if setting.on_gpu else _COUNTS_ON_CPU
    say(f"{setting.name}: Fashion-MNIST, {max(counts):,} images")
    found = fashion_mnist.clothes(max(counts))
    assert found is not None
    x = found.images.to(setting.device).float()
    expected = reference(setting.model, x, setting.workload.chunk)
    for dtype in setting.dtypes:
        known = standard(setting.model, x, dtype, expected, setting.workload.chunk)
        yield on_clothes(setting.engine(dtype), x, found.labels, known, counts)


def on_clothes(
    engine: Engine, x: torch.Tensor, labels: torch.Tensor, whole: Standard, counts: Sequence[int]
) -> list[Record]:
    """Return the accuracy on the first images, for each count."""
    (result,) = fresh(lambda: engine(x), tensors)
    logits, exact = result.cpu(), whole.expected[0].cpu()
    records = []
    for count in counts:
        first = slice(count)
        known = replace(whole, expected=(exact[first],))
        error, failure = known.judge((logits[first],))
        records.append(Record(
            "lenet_accuracy", f"fashion_mnist_n{count}", engine.dtype, "", count, "escalade", "",
            accuracy=_right(logits[first], labels[first]), error=error, tolerance=known.tolerance,
            failure=failure, note=f"float64: {_right(exact[first], labels[first]):.4f}",
        ))  # fmt: skip
    return records


def _right(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return float((logits.argmax(1) == labels).double().mean())


LENET = Workload(
    "lenet",
    _model,
    _images,
    fashion_mnist.SIZE,
    batches=(fashion_mnist.COUNT,),
    dtypes=("fp32", "fp16", "bf16"),
    peers=registry.plain("nchw", "nhwc"),
    parts={
        "accuracy": Part(_accuracy),
        "op-times": Part(op_times.measure),
        "batches": Part(parts.batches),
        "stream": Part(parts.stream, usual=False, needs_gpu=True, made=planned.of_stream),
    },
    small_batches=(2,),
    chunk=1_000,
    stream=Stream(_AS_IT_IS, _STREAM_BATCHES, fashion_mnist.COUNT),
    notice=_notice,
)
