"""The networks that `escalade bench` measures, by name, or by their constructors."""

from __future__ import annotations

import torch

from escalade import models
from escalade.bench.coverage.catalogue import entries
from escalade.bench.networks import parts
from escalade.bench.networks.autoencoder import AUTOENCODER
from escalade.bench.networks.lenet import LENET
from escalade.bench.networks.resnets import resnet
from escalade.bench.networks.spectral import SPECTRAL
from escalade.bench.networks.workload import Part, Workload
from escalade.bench.peers import registry
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

_SIDE = 224
"""The side of images that a constructor's network takes, if it does not say."""
_MOST, _TRIALS = 50.0, 3
"""How rounding is judged where weights may be of no training: see `Workload`."""


def workload(name: str) -> Workload:
    """The workload of that name, or that of the network which `module:name` makes."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    if ":" in name:
        return _of_constructor(name)
    raise UnsupportedError(
        f"there is no workload {name!r}; there is {', '.join(WORKLOADS)}, and any constructor as module:name. For a "
        "saved engine, `escalade check` has its plan beside PyTorch"
    )


def _of_constructor(name: str) -> Workload:
    entry, *others = entries(name)
    if others:
        raise UnsupportedError(f"{name} names several networks; bench measures one, and coverage all of them")
    side = entry.size or _SIDE
    item = entry.item or (3, side, side)

    def inputs(count: int, size: int, seed: int, device: torch.device) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(count, *item, generator=generator, device=device)

    return Workload(
        entry.name,
        lambda size, seed: entry.make(),
        inputs,
        item[-1],
        batches=(1, 8, 32),
        dtypes=("fp32", "fp16"),
        peers=registry.plain(*(("nchw", "nhwc") if len(item) == 3 else ("flat",))),
        parts={"accuracy": Part(parts.accuracy), "batches": Part(parts.batches)},
        classifies=False,
        most=_MOST,
        trials=_TRIALS,
    )
