"""ResNets with random weights, and random images that they distinguish."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from escalade import models
from escalade.models import ResNet
from escalade.models.resnet import BasicBlock, Bottleneck
from escalade.ops.base.dtypes import QUANTIZED
from escalade_bench.networks import host, parts, planned, training_step
from escalade_bench.networks.judging import MOST
from escalade_bench.networks.training_step import Training
from escalade_bench.networks.workload import Part, Stream, Workload
from escalade_bench.peers import registry

SIZE = 224
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SMALLEST = 32
_CALIBRATION_IMAGES = 4
_BLOCK_SCALE = 0.3
_CLASSES = 1000
_CHAOS = 100.0
"""Factor on the usual largest tolerance for gradients of random weights, if PyTorch's error is as large: the growth of
rounding errors through such layers is chaotic."""


def resnet(name: str, make: Callable[[], ResNet]) -> Workload:
    def made(size: int, seed: int) -> nn.Module:
        model, x = make(), images(_CALIBRATION_IMAGES, size, seed + 1)
        models.settle(model, x)
        _damp(model, x)
        return model

    return Workload(
        name,
        made,
        lambda count, size, seed, device: images(count, size, seed).to(device),
        SIZE,
        batches=(1, 4, 8, 16, 32, 64, 256),
        dtypes=tuple(dtype for dtype in MOST if dtype not in QUANTIZED),
        further_dtypes=QUANTIZED,
        peers=registry.RESNETS,
        parts={
            "accuracy": Part(parts.accuracy),
            "batches": Part(parts.batches),
            "phases": Part(host.phases, needs_gpu=True, made=planned.of_levels),
            "cpu": Part(host.cpu, usual=False, needs_gpu=True, dtypes=host.DTYPES),
            "layer-kinds": Part(
                host.layer_kinds, usual=False, needs_gpu=True, dtypes=host.DTYPES, made=planned.of_levels
            ),
            "stream": Part(parts.stream, usual=False, needs_gpu=True, made=planned.of_stream),
            "training-step": training_step.part(CLASSIFIES),
        },
        smallest=_SMALLEST,
        slow_batches=(1, 32, 256),
        stream=Stream((MEAN, DEVIATION), (1, 8, 32, 64, 256)),
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


def images(count: int, size: int = SIZE, seed: int = 0) -> torch.Tensor:
    """Return normalized images [count, 3, size, size]: blotches of several sizes, each with its own color and contrast.

    White noise is unsuitable: a network does not distinguish samples of it.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x = noise(count, 3, 1, 1).expand(count, 3, size, size)
    for cells in itertools.takewhile(lambda cells: cells <= size // 2, (2, 5, 14, 40, 112)):
        blotches = F.interpolate(noise(count, 3, cells, cells), (size, size), mode="bilinear")
        x = x + noise(count, 1, 1, 1) * blotches
    return 0.5 * x + 0.1 * noise(count, 3, size, size)
