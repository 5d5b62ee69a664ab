"""The networks that `escalade bench` measures, by name, by their constructors, or as programs of `torch.export`."""

from __future__ import annotations

import copy
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from escalade import models
from escalade.bench.coverage.catalogue import entries
from escalade.bench.networks import parts, training_step
from escalade.bench.networks.autoencoder import AUTOENCODER
from escalade.bench.networks.lenet import LENET
from escalade.bench.networks.resnets import UNTRAINED, resnet
from escalade.bench.networks.spectral import SPECTRAL
from escalade.bench.networks.workload import Part, Workload
from escalade.bench.peers import registry
from escalade.engine.programs import SUFFIX, example_of, module_of, read_program
from escalade.errors import UnsupportedError

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        *(resnet(make.__name__, make) for make in (models.resnet18, models.resnet34, models.resnet50)),
        AUTOENCODER,
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
"""The side of images that a constructor's network takes, if it does not say."""
_MOST, _TRIALS = 50.0, 3
"""How rounding is judged where weights may be of no training: see `Workload`."""


def workload(name: str) -> Workload:
    """The workload of that name, or that of the network which `module:name` makes, or which a .pt2 file holds."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    if name.endswith(SUFFIX):
        return _of_program(name)
    if ":" in name:
        return _of_constructor(name)
    raise UnsupportedError(
        f"there is no workload {name!r}; there is {', '.join(WORKLOADS)}, any constructor as module:name, and the "
        f"{SUFFIX} file of a program of torch.export. For a saved engine, `escalade check` has its plan beside PyTorch"
    )


class _Exported(nn.Module):
    """A program where a model is wanted: it computes the same in every mode, and refuses to be told one."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        self.program = module_of(program)

    def forward(self, x: torch.Tensor) -> Any:
        return self.program(x)

    def train(self, mode: bool = True) -> _Exported:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Exported:
        made = memo[id(self)] = _Exported.__new__(_Exported)
        with warnings.catch_warnings(category=FutureWarning):
            warnings.simplefilter("ignore")  # PyTorch warns of its own way to copy a program
            vars(made).update(copy.deepcopy(vars(self), memo))
        return made


def _of_program(name: str) -> Workload:
    program = read_program(name)
    given, named = example_of(program)
    first = given[0] if len(given) == 1 and not named else None
    if not isinstance(first, torch.Tensor) or not first.is_floating_point() or first.dim() < 2:
        raise UnsupportedError(
            f"{name} takes other inputs than one batch of numbers; bench measures networks of one such tensor, and "
            "`escalade check` has any network's plan beside PyTorch"
        )
    return _of_network(pathlib.Path(name).stem, lambda: _Exported(program), tuple(first.shape[1:]))


def _of_constructor(name: str) -> Workload:
    entry, *others = entries(name)
    if others:
        raise UnsupportedError(f"{name} names several networks; bench measures one, and coverage all of them")
    side = entry.size or _SIDE
    return _of_network(entry.name, entry.make, entry.item or (3, side, side))


def _repeatable(model: nn.Module) -> nn.Module:
    """Switch off dropout and stochastic depth, which would make every system's training another one."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0  # type: ignore[assignment]
    return model


def _of_network(name: str, make: Callable[[], nn.Module], item: tuple[int, ...]) -> Workload:
    """Any network that takes batches of such items."""

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
