"""The networks that `escalade bench` measures, by name."""

from __future__ import annotations

from escalade import models
from escalade.bench.networks.autoencoder import AUTOENCODER
from escalade.bench.networks.lenet import LENET
from escalade.bench.networks.resnets import resnet
from escalade.bench.networks.spectral import SPECTRAL
from escalade.bench.networks.workload import Workload
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


def workload(name: str) -> Workload:
    if name not in WORKLOADS:
        raise UnsupportedError(f"there is no workload {name!r}; there is {', '.join(WORKLOADS)}")
    return WORKLOADS[name]
