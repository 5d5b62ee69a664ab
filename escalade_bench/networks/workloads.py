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
from escalade.engine.programs import MODEL_FILES, is_model_file, module_of, read_model
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import QUANTIZED
from escalade_bench.coverage.catalogue import entries
from escalade_bench.measure.records import Record
from escalade_bench.networks import at_hand, parts, step_variants, training_step
from escalade_bench.networks.lenet import LENET
from escalade_bench.networks.resnets import UNTRAINED, images, resnet
from escalade_bench.networks.spectral import SPECTRAL
from escalade_bench.networks.training_step import Training
from escalade_bench.networks.workload import Part, Say, Setting, Workload
from escalade_bench.peers import registry

_TRAINED_WEIGHTS, _CIFAR = "autoencoder_naive.bin", "cifar10_test1000.npz"
"""Files of weights and of test images, which are not shipped."""
_TRAINING = Training(F.mse_loss, lambda x, seed: x, (64, 256, 1024), scale=2.0**16, rate=1e-2)


def _images(count: int, size: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return images [count, 3, size, size] in [0, 1]."""
    return torch.sigmoid(images(count, size, seed)).to(device)


class _Reconstruction(parts.Accuracy):
    """Measure the accuracy of an autoencoder: the mean squared error of its reconstructions."""

    def note(self, results: torch.Tensor) -> str:
        x, exact = self._inputs.double().cpu(), self._expected.cpu()
        ours, right = (float((y.double() - x).square().mean()) for y in (results, exact))
        return f"mean squared error {ours:.6f} on {len(x):,} images of CIFAR-10 (float64: {right:.6f})"


def _reconstruction(setting: Setting, say: Say) -> Iterator[list[Record]]:
    """Measure trained weights on images of CIFAR-10; without either, the error of random weights against float64."""
    weights, images = at_hand.find(_TRAINED_WEIGHTS), at_hand.find(_CIFAR)
    if weights is None or images is None:
        yield from parts.accuracy(setting, say)
        return
    say(f"{setting.name}: images of CIFAR-10 in float64")
    pixels = torch.from_numpy(np.load(images)["x"]).permute(0, 3, 1, 2)[: None if setting.on_gpu else 8]
    x = (pixels.float() / 255).to(setting.device)
    model = models.load_autoencoder(weights)
    workload = replace(setting.workload, make_inputs=lambda count, size, seed, device: x)
    judged = _Reconstruction(workload, model, len(x), setting.size, setting.session.seed)
    yield [
        judged.check(compile(model, x[:1], dtype=dtype, device=setting.device, plans=1))
        for dtype in setting.dtypes
    ]


_AUTOENCODER = Workload(
    "autoencoder",
    lambda size, seed: models.ConvAutoencoder(),
    _images,
    32,
    batches=(64, 256, 1024),
    dtypes=("fp16", "tf32", "fp32"),
    peers=registry.plain("nchw", "nhwc"),
    parts={
        "accuracy": Part(_reconstruction),
        "batches": Part(parts.batches),
        "training-step": training_step.part(_TRAINING),
        **step_variants.parts(_TRAINING),
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

TRAINED = tuple(
    f"torchvision:{name}"
    for name in (
        "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "densenet121", "convnext_tiny", "regnet_y_400mf",
        "shufflenet_v2_x1_0", "vgg11_bn",
    )
)  # fmt: skip
"""Networks of torchvision whose training is measured too."""
_SIDE = 224
"""Default side of the images of a constructor's network."""
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

    def inputs(count: int, size: int, seed: int, device: torch.device) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(count, *item, generator=generator, device=device)

    return Workload(
        name,
        lambda size, seed: _repeatable(make()),
        inputs,
        item[-1],
        batches=(1, 8, 32),
        dtypes=("fp32", "fp16"),
        peers=registry.plain(*(("nchw", "nhwc") if len(item) == 3 else ("flat",))),
        parts={
            "accuracy": Part(parts.accuracy),
            "batches": Part(parts.batches),
            "training-step": training_step.part(UNTRAINED),
        },
        classifies=False,
        most=_MOST,
        trials=_TRIALS,
    )
