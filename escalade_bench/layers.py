"""Single layers, mostly convolutions, and their peers: sets of layers, their measurement, and campaign units."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from escalade import ops
from escalade.device.program import Program
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card
from escalade.ops.base.problem import Problem
from escalade.ops.choose.choice import Choice, choose
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.stem import STEM
from escalade.ops.stem.problem import StemProblem
from escalade.tune import search, verification
from escalade.tune.sweep import UNTUNED
from escalade_bench.campaign.units import TIMED, Say, Session, Unit, command
from escalade_bench.ladder import free, measure_jobs
from escalade_bench.measure.currency import Made
from escalade_bench.measure.figures import with_gains
from escalade_bench.measure.records import Record
from escalade_bench.peers.layer import LayerPeer, stem_convolution, stem_peer
from escalade_bench.peers.registry import LAYERS, SLOW
from escalade_bench.trial import Settings, refusal

DIRECTIONS = {
    "forward": "conv2d",
    "input_gradient": "conv2d_input_gradient",
    "weight_gradient": "conv2d_weight_gradient",
}
"""The directions of a convolution, and the operation of each."""
WORKLOADS = {
    direction: "layers" if direction == "forward" else f"layers_{direction}" for direction in DIRECTIONS
}
"""Workloads of the records, by direction."""
IMAGE_CHANNELS = 4
"""Inputs with up to this many channels count as images, which need no gradient."""


@dataclass(frozen=True)
class Layer:
    """A problem of an operation, and its number in a network."""

    operation: str
    problem: Any
    count: int = 1

    @property
    def key(self) -> tuple[str, Problem]:
        return self.operation, self.problem


def _conv(
    channels: int, filters: int, size: int, filter_size: int, stride: int = 1, **rest: Any
) -> Conv2dProblem:
    return Conv2dProblem.square(
        channels, filters, size, filter_size, stride=stride, layout="nhwc", bias=True, **rest
    )


def _counted(problems: Iterable[Conv2dProblem]) -> tuple[Layer, ...]:
    """Return each problem once with its count, in the order of first occurrence."""
    return tuple(Layer("conv2d", problem, count) for problem, count in Counter(problems).items())


def _resnet(depths: Sequence[int], bottleneck: bool, batch: int, dtype: str) -> tuple[Layer, ...]:
    """Return the convolutions of a ResNet with BatchNorm folded into biases and residuals added in the epilogue."""
    rest: dict[str, Any] = {"batch": batch, "dtype": dtype}
    found = [_conv(3, 64, 224, 7, 2, relu=True, **rest)]
    channels, size = 64, 56
    for stage, depth in enumerate(depths):
        width = 64 << stage
        filters = 4 * width if bottleneck else width
        for position in range(depth):
            stride = 2 if stage and not position else 1
            after = size // stride
            if stride > 1 or channels != filters:
                found.append(_conv(channels, filters, size, 1, stride, **rest))
            if bottleneck:
                found.append(_conv(channels, width, size, 1, relu=True, **rest))
                found.append(_conv(width, width, size, 3, stride, relu=True, **rest))
                found.append(_conv(width, filters, after, 1, residual=True, relu=True, **rest))
            else:
                found.append(_conv(channels, width, size, 3, stride, relu=True, **rest))
                found.append(_conv(width, width, after, 3, residual=True, relu=True, **rest))
            channels, size = filters, after
    return _counted(found)


def stem(batch: int, dtype: str) -> tuple[Layer, ...]:
    """Return the first convolution of a ResNet, alone and with its pooling, which are two steps of peers."""
    first = Layer("conv2d", _conv(3, 64, 224, 7, 2, relu=True, batch=batch, dtype=dtype))
    if dtype not in STEM.dtypes:
        return (first,)
    source = "fp32" if dtype == "tf32" else dtype
    pooled = StemProblem(
        batch, 3, 224, 224, 64, 7, 7, (2, 2), (3, 3), source, "nhwc", pool=(3, 2, 1), dtype=dtype
    )
    return first, Layer("stem", pooled)


def depthwise(batch: int, dtype: str) -> tuple[Layer, ...]:
    """Return MobileNetV2's and ConvNeXt's depthwise convolutions, and one with a very large filter."""
    mobilenet = (
        (32, 112, 1), (96, 112, 2), (144, 56, 1), (144, 56, 2), (192, 28, 1), (192, 28, 2), (384, 14, 1),
        (576, 14, 1), (576, 14, 2), (960, 7, 1),
    )  # fmt: skip
    rest: dict[str, Any] = {"batch": batch, "dtype": dtype}
    found = [_conv(c, c, size, 3, stride, groups=c, relu=True, **rest) for c, size, stride in mobilenet]
    found += [
        _conv(c, c, size, 7, groups=c, **rest) for c, size in ((96, 56), (192, 28), (384, 14), (768, 7))
    ]
    found.append(_conv(256, 256, 56, 31, groups=256, **rest))
    return _counted(found)


def untuned(batch: int, dtype: str) -> tuple[Layer, ...]:
    """Return problems without an entry in any table, at their own batches."""
    return tuple(Layer("conv2d", replace(problem, dtype=dtype, layout="nhwc")) for problem in UNTUNED)


SETS: dict[str, Callable[[int, str], tuple[Layer, ...]]] = {
    "resnet18": partial(_resnet, (2, 2, 2, 2), False),
    "resnet50": partial(_resnet, (3, 4, 6, 3), True),
    "stem": stem,
    "depthwise": depthwise,
    "untuned": untuned,
}


def named(name: str, batch: int, dtype: str) -> tuple[Layer, ...]:
    """Return the layers of a set, or the one convolution with that name (and its own batch)."""
    if name in SETS:
        return SETS[name](batch, dtype)
    try:
        problem = Conv2dProblem.parse(name, dtype, "nhwc")
        ops.operation("conv2d").require_work(problem)
        return (Layer("conv2d", problem),)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{name!r} is neither a set of layers ({', '.join(SETS)}) nor a convolution: {error}"
        ) from None


def in_direction(layers: Sequence[Layer], direction: str) -> tuple[Layer, ...]:
    """Return these layers, or the gradients of the convolutions among them; images have no input gradient."""
    if direction == "forward":
        return tuple(layers)
    if direction not in DIRECTIONS:
        raise UnsupportedError(f"there is no direction {direction!r}; known: {', '.join(DIRECTIONS)}")
    operation = ops.operation(DIRECTIONS[direction])
    counts: Counter[Any] = Counter()
    for layer in (one for one in layers if one.operation == "conv2d"):
        if direction == "weight_gradient" or layer.problem.channels > IMAGE_CHANNELS:
            plain = replace(layer.problem, bias=False, residual=False, relu=False)
            problem = replace(operation.parse(plain.name), dtype=plain.dtype, layout=plain.layout)
            counts[problem] += layer.count
    return tuple(Layer(operation.name, problem, count) for problem, count in counts.items())


@dataclass(frozen=True)
class Part:
    """A set in one dtype and batch."""

    name: str
    title: str
    layers: tuple[Layer, ...]


def parts(
    names: Sequence[str], batches: Sequence[int], dtypes: Sequence[str], direction: str
) -> tuple[Part, ...]:
    """Return every set in every dtype and batch that has layers."""
    found: dict[tuple[Layer, ...], Part] = {}  # a set with its own batches is the same at every other
    for dtype, batch, name in itertools.product(dtypes, batches, names):
        members = in_direction(named(name, batch, dtype), direction)
        title = f"{name}, {direction.replace('_', ' ')}, {dtype}"
        if all(layer.problem.batch == batch for layer in members):
            title += f", batch {batch}"
        if members:
            found.setdefault(members, Part(name, title, members))
    return tuple(found.values())


def chosen_for(layer: Layer, device: torch.device, tune: bool, seed: int = 0) -> Choice:
    """Return the choice of a call; with `tune`, the fastest measured config of all preferred rungs."""
    operation = ops.operation(layer.operation)
    if not tune:
        return choose(operation, layer.problem, device)
    entry = search.fastest(operation, layer.problem, device, seed)
    rung = operation.ladder.rung(entry.rung).on(Card.of(device))
    config = next(c for c in rung.configs(layer.problem) if c.as_dict() == entry.config)
    return Choice(rung, config, layer.problem, "the fastest of all configs of the preferred rungs")


def programs(layers: Iterable[Layer], device: torch.device, tune: bool) -> list[Program]:
    """Return the programs to compile. A layer that no rung takes is reported by the measurement."""
    found: dict[Program, None] = {}
    for layer in layers:
        with contextlib.suppress(UnsupportedError):
            if tune:
                operation = ops.operation(layer.operation)
                wanted: Sequence[Program] = search.programs(operation, (layer.problem,), Card.of(device))
            else:
                chosen = chosen_for(layer, device, tune=False)
                wanted = chosen.rung.recipe(chosen.problem, chosen.config).programs
            found.update(dict.fromkeys(wanted))
    return list(found)


def candidates(layer: Layer, names: Sequence[str]) -> tuple[list[LayerPeer], list[Record]]:
    """Return the peers that may be able to run a layer, and records of those that refuse it.

    Pooling is a second step of theirs.
    """
    stem = layer.operation == "stem"
    operation = ops.operation("conv2d" if stem else layer.operation)
    found: list[LayerPeer] = []
    refused: list[Record] = []
    for name in names:
        try:
            peers = LAYERS[name](operation, stem_convolution(layer.problem) if stem else layer.problem)
        except UnsupportedError as why:
            refused.append(refusal(ops.operation(layer.operation), layer.problem, name, str(why)))
            continue
        found += [stem_peer(peer) for peer in peers if peer.layout == "nhwc"] if stem else peers
    return found, refused


def measure(layer: Layer, peers: Sequence[str], settings: Settings, workload: str) -> list[Record]:
    """Return a record of ours (a failure if it is wrong) and one per peer; none if no rung of ours runs the layer."""
    operation, problem = ops.operation(layer.operation), layer.problem
    device, say = settings.device, settings.say
    label = f"{problem.name} {problem.dtype}"
    say(f"{label}: {'tuning' if settings.tune else 'choosing'}")
    try:
        chosen = chosen_for(layer, device, settings.tune, settings.seed)
    except UnsupportedError as why:
        (settings.note or say)(f"{label}: {why}")
        return []
    say(f"{label}: verifying {chosen.rung.name} and peers")
    offered, refused = candidates(layer, peers) if device.type == "cuda" else ([], [])
    settings = replace(settings, tune=False, weights_are_constant=not operation.weights_change)
    jobs = [verification.VerificationJob(chosen.problem, chosen.rung, chosen.config)]
    records = measure_jobs(operation, problem, jobs, offered, settings)
    free(device)
    remark = chosen.why
    if chosen.problem.layout != problem.layout:
        remark += f"; in layout {chosen.problem.layout}, not counting the conversion"

    def filed(r: Record) -> Record:
        note = r.note if r.is_peer or r.failure else "; ".join(filter(None, (remark, r.note)))
        return replace(r, workload=workload, note=note)

    return [filed(record) for record in with_gains(records + refused, operation.ladder)]


_EVERY = (256, 32, 8, 1)
FORWARD: dict[str, dict[str, tuple[int, ...]]] = {
    "fp16": {"resnet50": _EVERY, "resnet18": _EVERY, "stem": (256,), "depthwise": (256,), "untuned": (0,)},
    "tf32": {"resnet18": (256,), "resnet50": (256,)},
    "bf16": {"resnet50": (256,)},
    "fp8": {"resnet50": (256,)},
    "fp32": {"resnet50": (256,)},
}
"""The sets of the docs, by dtype, with their batches; `untuned` has batches of its own."""
BACKWARD: dict[str, dict[str, tuple[int, ...]]] = {
    "fp16": {"resnet50": (256, 32), "resnet18": (256, 32)},
    "tf32": {"resnet50": (256,)},
    "fp32": {"resnet50": (256,)},
}
_SECONDS = 2.0


def units() -> Iterator[Unit]:
    """Yield every layer once in each direction, dtype and batch; several sets may have it."""
    found: dict[str, Unit] = {}
    for direction in DIRECTIONS:
        for dtype, sets in (FORWARD if direction == "forward" else BACKWARD).items():
            for name, batch in ((name, batch) for name, batches in sets.items() for batch in batches):
                for part in parts((name,), (batch,), (dtype,), direction):
                    for unit in (_unit(layer, name, batch, direction) for layer in part.layers):
                        found.setdefault(unit.name, unit)
    yield from found.values()


def _unit(layer: Layer, name: str, batch: int, direction: str) -> Unit:
    dtype = layer.problem.dtype
    peers = tuple(peer for peer in LAYERS if peer not in SLOW)

    def measured(session: Session, say: Say) -> Iterator[list[Record]]:
        yield measure(layer, peers, session.settings(say), WORKLOADS[direction])

    def made(session: Session, record: Record) -> Made:
        chosen = chosen_for(layer, session.device, tune=False)
        return Made.of_rung(chosen.rung, chosen.problem, chosen.config)

    asked = (name, *(("-b", batch) if batch else ()), "-t", dtype, "-d", direction)
    return Unit(
        f"layers/{direction}/{layer.operation}/{layer.problem.name}/{dtype}",
        f"a layer of {name} beside its peers",
        command("bench", "layers", *asked, "--peers", ",".join(peers), *TIMED),
        _SECONDS,
        measured,
        made,
        peers,
    )
