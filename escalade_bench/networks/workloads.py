"""The networks that `escalade bench` measures, by name, by constructor, or as programs of `torch.export`."""

from __future__ import annotations

import copy
import pathlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from escalade import models
from escalade.engine import compile
from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.programs import MODEL_FILES, is_model_file, module_of, read_model
from escalade.errors import UnsupportedError
from escalade.models import ResNet
from escalade.models.resnet import BasicBlock, Bottleneck
from escalade.ops.base.dtypes import QUANTIZED
from escalade_bench.coverage.catalogue import entries
from escalade_bench.measure.records import Record
from escalade_bench.networks import data, host, op_times, parts, plans, training_step
from escalade_bench.networks.judging import MOST
from escalade_bench.networks.training_step import Training
from escalade_bench.networks.workload import Part, Say, Setting, Stream, Workload
from escalade_bench.peers import registry

STREAM = Part(parts.stream, usual=False, needs_gpu=True, made=plans.of_stream)
_PLAIN = {"accuracy": Part(parts.accuracy), "batches": Part(parts.batches)}
_CHAOS = 100.0
"""Factor on the usual largest tolerance for gradients of random weights, if PyTorch's error is as large: the growth of
rounding errors through such layers is chaotic."""

# --- ResNets with random weights

_NORMALIZATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SIDE, _SMALLEST = 224, 32
_CALIBRATION_IMAGES = 4
_BLOCK_SCALE = 0.3
_CLASSES = 1000


def resnet(name: str, make: Callable[[], ResNet]) -> Workload:
    def made(size: int, seed: int) -> nn.Module:
        model, x = make(), data.images(_CALIBRATION_IMAGES, size, seed + 1)
        models.settle(model, x)
        _damp(model, x)
        return model

    on_cpu = Part(host.cpu, usual=False, needs_gpu=True, dtypes=host.DTYPES)
    return Workload(
        name,
        made,
        data.images,
        _SIDE,
        batches=(1, 4, 8, 16, 32, 64, 256),
        dtypes=tuple(dtype for dtype in MOST if dtype not in QUANTIZED),
        further_dtypes=QUANTIZED,
        peers=registry.RESNETS,
        parts={
            **_PLAIN,
            "phases": Part(host.phases, needs_gpu=True, made=plans.of_levels),
            "cpu": on_cpu,
            "layer-kinds": replace(on_cpu, measure=host.layer_kinds, made=plans.of_levels),
            "stream": STREAM,
            "training-step": training_step.part(CLASSIFIES),
        },
        smallest=_SMALLEST,
        slow_batches=(1, 32, 256),
        stream=Stream(_NORMALIZATION, (1, 8, 32, 64, 256)),
    )


def _classes(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a random class per image."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, _CLASSES, (len(x),), generator=generator).to(x.device)


def _one_class(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the same class for every image: gradients of random classes cancel, which leaves rounding errors."""
    return torch.zeros(len(x), dtype=torch.long, device=x.device)


UNTRAINED = Training(F.cross_entropy, _one_class, (64,), scale=2.0**10, rate=1e-4, most=_CHAOS)
"""Training of a network with the random weights of its constructor."""
CLASSIFIES = Training(F.cross_entropy, _classes, (64, 256), scale=2.0**10, rate=1e-3, most=_CHAOS)
"""Training of a ResNet."""


def _damp(model: ResNet, x: torch.Tensor) -> None:
    """Scale blocks down: those of a trained network add little to their residual.

    With full scales a network of random weights is chaotic: rounding errors grow eightfold over a ResNet-50.
    """
    with torch.no_grad():
        for block in model.modules():
            if isinstance(block, BasicBlock | Bottleneck):
                last = block.bn3 if isinstance(block, Bottleneck) else block.bn2
                last.weight.mul_(_BLOCK_SCALE)
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.reset_running_stats()
                norm.momentum = None  # a plain average, of one batch
        model.train()(x)
    model.eval()


# --- a LeNet on 10,000 grey images, and its accuracy on Fashion-MNIST

_COUNTS, _COUNTS_ON_CPU = (100, 1_000, 10_000), (100,)
_AS_IT_IS = ((0.0,), (1 / 255,))
"""A normalization that leaves gray values unchanged."""
_FASHION = data.WEIGHTS, data.IMAGES, data.LABELS


def _lenet(size: int, seed: int) -> nn.Module:
    weights = data.find(data.WEIGHTS)
    return models.LeNet() if weights is None else models.load_lenet(weights)


def _notice() -> str:
    absent = data.missing(*_FASHION)
    return absent and (
        f"{absent}; ESCALADE_DATA names another folder. Random data is used instead, and there is no accuracy on "
        "Fashion-MNIST."
    )


def _accuracy(setting: Setting, say: Say) -> Iterator[list[Record]]:
    """Measure the accuracy on Fashion-MNIST; without it, the error against float64."""
    counts = _COUNTS if setting.on_gpu else _COUNTS_ON_CPU
    if data.missing(*_FASHION):
        yield from parts.accuracy(setting, say)
        return
    say(f"{setting.name}: Fashion-MNIST, {max(counts):,} images")
    found = data.clothes(max(counts))
    assert found is not None
    judged = OnClothes(setting, setting.model, found.images.to(setting.device).float())
    for dtype in setting.dtypes:
        yield judged.by_count(setting.engine(dtype), found.labels, counts)


class OnClothes(parts.Accuracy):
    """The share of right answers."""

    def by_count(self, engine: Engine, labels: torch.Tensor, counts: tuple[int, ...]) -> list[Record]:
        """Return a record of the first images, for each count."""
        logits, whole = self.results(engine).cpu(), self.standard(engine.dtype)
        exact = whole.expected[0].cpu()

        def right(answers: torch.Tensor, count: int) -> float:
            return float((answers[:count].argmax(1) == labels[:count]).double().mean())

        records = []
        for count in counts:
            known = replace(whole, expected=(exact[:count],))
            error, failure = known.judge((logits[:count],))
            records.append(Record(
                f"{self.name}_accuracy", f"fashion_mnist_n{count}", engine.dtype, "", count, "escalade", "",
                accuracy=right(logits, count), error=error, tolerance=known.tolerance, failure=failure,
                note=f"float64: {right(exact, count):.4f}",
            ))  # fmt: skip
        return records


LENET = Workload(
    "lenet",
    _lenet,
    data.grey,
    data.CLOTHES_SIDE,
    batches=(data.COUNT,),
    dtypes=("fp32", "fp16", "bf16"),
    peers=registry.plain("nchw", "nhwc"),
    parts={
        "accuracy": Part(_accuracy),
        "op-times": Part(op_times.measure),
        "batches": Part(parts.batches),
        "stream": STREAM,
    },
    small_batches=(2,),
    chunk=1_000,
    stream=Stream(_AS_IT_IS, (2_500, 10_000), data.COUNT),
    notice=_notice,
)

# --- an autoencoder of spectrogram frames: one small network at every batch size, its anomaly score, its training

_SCORE_BATCHES = (512, 1_048_576)


class Score(nn.Module):
    """The autoencoder with anomaly scores as results."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        assert isinstance(model, models.SpectralAutoencoder)
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.anomaly_score(x)


def _score(setting: Setting, say: Say) -> Iterator[list[Record]]:
    model = Score(setting.model).eval()
    graph = capture(model, (setting.inputs(2, 0).cpu(),))
    engines = {dtype: Engine(graph, dtype, setting.device, plans=1) for dtype in setting.dtypes}
    sizes = setting.among(_SCORE_BATCHES)
    yield from parts.over_batches(setting, f"{setting.name}_score", model, engines, sizes, say)


def fused(model: nn.Module) -> nn.Module:
    """Return the same network and parameters with all layers as one operator, which has kernels for its gradients."""
    assert isinstance(model, models.SpectralAutoencoder)
    made = models.FusedSpectralAutoencoder(model.bands, model.frames, len(model.basis))
    made.load_state_dict(model.state_dict())
    return made.to(model.basis.device).train(model.training)


def _itself(x: torch.Tensor, seed: int) -> torch.Tensor:
    return x


_SPECTRAL_TRAINING = Training(
    F.mse_loss, _itself, (32, 64, 128, 256, 512, 65_536, 1_048_576), scale=2.0**16, rate=1e-2, ours=fused
)  # fmt: skip
SPECTRAL = Workload(
    "spectral_autoencoder",
    lambda size, seed: models.SpectralAutoencoder(data.BANDS, data.FRAMES),
    data.frames,
    data.FRAMES * data.BANDS,
    batches=(32, 64, 128, 256, 512, 4_096, 65_536, 1_048_576),
    dtypes=("fp32", "fp16"),
    peers=registry.plain("flat"),
    parts={
        **_PLAIN,
        "score": Part(_score, batches=_SCORE_BATCHES),
        "training-step": training_step.part(_SPECTRAL_TRAINING),
    },
    small_batches=(32,),
    slow_batches=(32, 512, 65_536, 1_048_576),
    chunk=65_536,
    classifies=False,
)

# --- a convolutional autoencoder on CIFAR-10

_TRAINED_WEIGHTS, _CIFAR = "autoencoder_naive.bin", "cifar10_test1000.npz"
"""Files of weights and of test images, which are not shipped."""
_TRAINING = Training(F.mse_loss, _itself, (64, 256, 1024), scale=2.0**16, rate=1e-2)


class _Reconstruction(parts.Accuracy):
    """Measure the accuracy of an autoencoder: the mean squared error of its reconstructions."""

    def note(self, results: torch.Tensor) -> str:
        x, exact = self.x.double().cpu(), self.expected.cpu()
        ours, right = (float((y.double() - x).square().mean()) for y in (results, exact))
        return f"mean squared error {ours:.6f} on {len(x):,} images of CIFAR-10 (float64: {right:.6f})"


def _reconstruction(setting: Setting, say: Say) -> Iterator[list[Record]]:
    """Measure trained weights on images of CIFAR-10; without either, the error of random weights against float64."""
    weights, images = data.find(_TRAINED_WEIGHTS), data.find(_CIFAR)
    if weights is None or images is None:
        yield from parts.accuracy(setting, say)
        return
    say(f"{setting.name}: images of CIFAR-10 in float64")
    pixels = torch.from_numpy(np.load(images)["x"]).permute(0, 3, 1, 2)[: None if setting.on_gpu else 8]
    x, model = (pixels.float() / 255).to(setting.device), models.load_autoencoder(weights)
    judged = _Reconstruction(setting, model, x)
    yield [
        judged.check(compile(model, x[:1], dtype=dtype, device=setting.device, plans=1))
        for dtype in setting.dtypes
    ]


_AUTOENCODER = Workload(
    "autoencoder",
    lambda size, seed: models.ConvAutoencoder(),
    lambda count, size, seed, device: torch.sigmoid(data.images(count, size, seed)).to(device),
    32,
    batches=(64, 256, 1024),
    dtypes=("fp16", "tf32", "fp32"),
    peers=registry.plain("nchw", "nhwc"),
    parts={
        "accuracy": Part(_reconstruction),
        "batches": Part(parts.batches),
        "training-step": training_step.part(_TRAINING),
        **training_step.variants(_TRAINING),
    },
    smallest=4,
    small_batches=(4,),
    classifies=False,
)

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        *(resnet(make.__name__, make) for make in (models.resnet18, models.resnet34, models.resnet50)),
        _AUTOENCODER,
        LENET,
        SPECTRAL,
    )
}

# --- any other network

TRAINED = tuple(
    f"torchvision:{name}"
    for name in (
        "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "densenet121", "convnext_tiny", "regnet_y_400mf",
        "shufflenet_v2_x1_0", "vgg11_bn", "vit_b_16",
    )
)  # fmt: skip
"""Networks of torchvision whose training is measured too."""
_MOST, _TRIALS = 50.0, 3
"""Tolerance settings for networks whose weights may be untrained: see `Workload`."""


def workload(name: str) -> Workload:
    """Return a workload by its name, by a constructor `module:name`, or of a model's file."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    if is_model_file(name):
        return _of_file(name)
    if ":" in name:
        return _of_constructor(name)
    raise UnsupportedError(
        f"there is no workload {name!r}; known: {', '.join(WORKLOADS)}, any constructor as module:name, "
        f"{MODEL_FILES}. For a saved engine, `escalade bench check` compares its plan "
        "with PyTorch"
    )


def require_options(dtypes: tuple[str, ...], size: int | None, chosen: Workload) -> None:
    """Raise UnsupportedError for dtypes or a size that a network is not measured in."""
    if missing := [dtype for dtype in dtypes if dtype in QUANTIZED and dtype not in chosen.further_dtypes]:
        raise UnsupportedError(
            f"{chosen.name} is measured in {', '.join(chosen.dtypes)}; {' and '.join(missing)} is for ResNets"
        )
    if size is None or size == chosen.size:
        return
    if chosen.smallest is None:
        raise UnsupportedError(f"inputs of {size}: {chosen.name} takes {chosen.size} only")
    if size < chosen.smallest:
        raise UnsupportedError(f"images of {size}: these networks take {chosen.smallest} or more")


def wanted_parts(
    named: set[str], with_usual: bool, phases: bool, chosen: Workload, on_gpu: bool
) -> tuple[str, ...]:
    """Return the named parts, or the usual ones that can be measured here, optionally without phases."""
    for name in named:
        if name not in chosen.parts:
            raise UnsupportedError(f"{chosen.name} has no part {name!r}; it has {', '.join(chosen.parts)}")
        if chosen.parts[name].needs_gpu and not on_gpu:
            raise UnsupportedError(f"{name} is measured on a GPU, and there is none")
    usual = {name for name, part in chosen.parts.items() if part.usual and (on_gpu or not part.needs_gpu)}
    wanted = (named | usual if with_usual else named) - (set() if phases else {"phases"})
    if not wanted:
        raise UnsupportedError(
            f"no part is left to measure here; {chosen.name} has {', '.join(chosen.parts)}"
            + ("" if on_gpu else ", some of them on a GPU only")
        )
    return tuple(name for name in chosen.parts if name in wanted)


class _Exported(nn.Module):
    """A model from a file: it computes the same in every mode, and a program cannot be switched."""

    def __init__(self, model: nn.Module | torch.export.ExportedProgram) -> None:
        super().__init__()
        self.program = module_of(model) if isinstance(model, torch.export.ExportedProgram) else model

    def forward(self, x: torch.Tensor) -> Any:
        return self.program(x)

    def train(self, mode: bool = True) -> _Exported:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Exported:
        made = memo[id(self)] = _Exported.__new__(_Exported)
        with warnings.catch_warnings(category=FutureWarning):
            warnings.simplefilter("ignore")  # of PyTorch's own deprecated copy
            vars(made).update(copy.deepcopy(vars(self), memo))
        return made


def _of_file(name: str) -> Workload:
    file = read_model(name)
    given, named = file.require_arguments(), file.keywords
    first = given[0] if len(given) == 1 and not named else None
    if not isinstance(first, torch.Tensor) or not first.is_floating_point() or first.dim() < 2:
        raise UnsupportedError(
            f"{name} takes other inputs than one batch of numbers; bench measures networks of one such tensor, and "
            "`escalade bench check` has any network's plan beside PyTorch"
        )
    return _of_network(pathlib.Path(name).stem, lambda: _Exported(file.model), tuple(first.shape[1:]))


def _of_constructor(name: str) -> Workload:
    entry, *others = entries(name)
    if others:
        raise UnsupportedError(f"{name} names several networks; bench measures one, and coverage all of them")
    side = entry.size or _SIDE
    return _of_network(entry.name, entry.make, entry.item or (3, side, side))


def _repeatable(model: nn.Module) -> nn.Module:
    """Switch off dropout and stochastic depth, which would differ between systems."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0  # type: ignore[assignment]
    return model


def _of_network(name: str, make: Callable[[], nn.Module], item: tuple[int, ...]) -> Workload:
    """Return the workload of any network, for batches of items of this shape."""
    return Workload(
        name,
        lambda size, seed: _repeatable(make()),
        lambda count, size, seed, device: data.noise(item, count, seed, device),
        item[-1],
        batches=(1, 8, 32),
        dtypes=("fp32", "fp16"),
        peers=registry.plain(*(("nchw", "nhwc") if len(item) == 3 else ("flat",))),
        parts={**_PLAIN, "training-step": training_step.part(UNTRAINED)},
        classifies=False,
        most=_MOST,
        trials=_TRIALS,
    )
