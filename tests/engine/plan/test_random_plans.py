"""Random networks: their plans keep every value until its last reader, and results are right."""

from __future__ import annotations

import math
import random

import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine.capture.export import capture
from tests.engine.plan.simulation import check_execution
from tests.engine.plan.test_plan import check_memory, planned

NETWORKS = 20
KINDS = (
    "relu sin pool softmax add conv padded gated table view flat transpose flip cumsum expand mean norm turned rows "
    "slice slice slice cat cat cat"
).split()
VIEWS = (
    lambda value: value.transpose(2, 3),
    lambda value: value[:, ::2],
    lambda value: value[:, :, 1:].transpose(1, 3),
    lambda value: value[:, :, :1].expand(-1, -1, 3, -1),
    lambda value: value.flatten(1)[:, 5:].unfold(1, 3, 2),
)


class Drawn(nn.Module):
    """Random views, ranges, concatenations, in-place kernels and PyTorch's steps. No value
    grows, so that rounding in another order stays small."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        chance = random.Random(self.seed)
        values = [F.max_pool2d(x, 3, 1, 1)]
        # Only PyTorch reads this view, in the last step: its base must live as long.
        early = chance.choice(VIEWS)(torch.softmax(x, -1))
        for _ in range(chance.randint(6, 18)):
            value = values[-1] if chance.random() < 0.4 else chance.choice(values)
            values.append(_drawn(chance, chance.choice(KINDS), value, values))
        chosen = [values[-1], *chance.sample(values, 2)]
        return [*chosen, chosen[1].flatten(1), chosen[2][:, :1], early.cumsum(1) / 16]


def _drawn(chance: random.Random, kind: str, value: torch.Tensor, values: list[torch.Tensor]) -> torch.Tensor:
    channels, height = value.shape[1:3]
    if kind == "slice" and channels > 1:
        # Half of these are aligned for wide accesses, so that kernels read them in place.
        step = 4 if channels > 8 and chance.random() < 0.7 else 1
        first = chance.randrange(0, channels - 1, step)
        if chance.random() < 0.2:
            return value[:, first - channels :]  # counted from the end
        if chance.random() < 0.2:
            pieces = value.chunk(3, 1)  # the last one may be smaller
            return pieces[chance.randrange(len(pieces))]
        return value[:, first : chance.randrange(first + 1, channels + 1)]
    if kind == "cat" and channels < 64:
        like = [one for one in values if one.shape[2] == height]
        return torch.cat([value, *chance.choices(like, k=chance.randint(1, 3))], 1)
    if kind == "rows":
        return F.interpolate(value[:, :, chance.randrange(height) :], size=(4, 4))
    match kind:
        case "relu":
            return F.relu(value)
        case "pool":
            return F.max_pool2d(value, 3, 1, 1)
        case "softmax":
            return torch.softmax(value, -1)
        case "conv":
            return F.conv2d(value, _weights(16, channels, 1, 1), _weights(16)).relu()
        case "padded":
            wide = F.pad(value, (1, 1, 1, 1))
            return F.conv2d(wide, _weights(16, channels, 3, 3)) / 3 + wide[:, :1, 1:5, 1:5]
        case "gated":
            gated = F.conv2d(value, _weights(channels, channels, 1, 1)) * _weights(channels, 1, 1)
            return torch.sigmoid(gated) * chance.choice([one for one in values if one.shape == value.shape])
        case "table":
            return value * _weights(channels, height, 1)
        case "add":
            return (value + chance.choice([one for one in values if one.shape == value.shape])) / 2
        case "view":
            return value.flatten(2).view(value.shape)
        case "flat":
            return F.relu(torch.softmax(value.flatten(1), -1)).view(value.shape)
        case "transpose":
            return value.transpose(2, 3)
        case "flip":
            return value.flip(1)
        case "cumsum":
            return value.cumsum(1) / channels
        case "turned":
            once = F.relu(value.permute(0, 2, 1, 3)) / 2
            return torch.sigmoid(once.permute(0, 1, 3, 2)).permute(0, 3, 1, 2)
        case "norm":
            return F.group_norm(value, math.gcd(channels, 4), eps=0.1)
        case "expand":
            return value[:, :, :1].expand(-1, -1, 4, -1)
        case "mean":
            return value - value.mean((2, 3), keepdim=True)
    return value.sin()


def _weights(*sizes: int) -> torch.Tensor:
    """Numbers that PyTorch's tracer takes as constants of the model, small enough that values do not grow."""
    fan = math.prod(sizes[1:]) if len(sizes) > 3 else 1
    return torch.arange(math.prod(sizes)).mul(0.7).cos().view(sizes) / fan**0.5


def test_plans_of_random_networks_match_their_graphs(seed: int) -> None:
    for number in range(seed, seed + NETWORKS):
        model, x = Drawn(number).eval(), torch.randn(2, 16, 4, 4)
        graph = capture(model, (x,))
        for dtype in ("fp32", "fp16"):
            plan = planned(graph, 2, dtype)
            check_memory(plan)
            results = check_execution(plan, x)
            if dtype == "fp32":
                torch.testing.assert_close(results, model(x), rtol=1e-3, atol=1e-4)
