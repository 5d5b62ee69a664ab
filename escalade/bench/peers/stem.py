"""A stem by other systems: their convolution with bias and ReLU, then PyTorch's pooling."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from escalade.bench.peers.layer import Inputs, LayerPeer
from escalade.errors import UnsupportedError
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.stem.problem import StemProblem


def convolution(problem: StemProblem) -> Conv2dProblem:
    """What comes before the pooling. Pixels must be what the convolution takes, so that nobody has to convert them."""
    p = problem
    if p.normalise or p.source != p.storage or p.source_layout != "nhwc":
        raise UnsupportedError(f"{p.name}: peers take images in nhwc and {p.storage}, normalised before")
    return Conv2dProblem(
        p.batch, p.channels, p.height, p.width, p.filters, p.filter_height, p.filter_width, p.stride, p.padding,
        dtype=p.dtype, layout="nhwc", bias=True, relu=p.relu, activation=p.activation,
    )  # fmt: skip


def in_two_steps(peer: LayerPeer) -> LayerPeer:
    """A peer for convolutions as one for stems."""
    reshape = _Filters()

    def run(problem: StemProblem, inputs: Inputs) -> torch.Tensor:
        p, asked = problem, convolution(problem)
        x = inputs["x"].view(p.batch, p.height, p.width, p.channels).permute(0, 3, 1, 2)
        filters = reshape(p, inputs["weight"])
        y = peer.run(asked, {"x": x, "weight": filters, "bias": inputs["bias"]})
        return F.max_pool2d(y, *p.pool) if p.pool else y

    return replace(peer, layout="nhwc", run=run)


class _Filters:
    """Filters in nhwc, made once for each tensor: they stay while images come and go."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, problem: StemProblem, weight: torch.Tensor) -> torch.Tensor:
        address = weight.data_ptr()
        if address not in self._made:  # the original is kept with it, so that the address stays taken
            size = (problem.filters, problem.channels, problem.filter_height, problem.filter_width)
            self._made[address] = weight, weight.view(size).contiguous(memory_format=torch.channels_last)
        return self._made[address][1]
