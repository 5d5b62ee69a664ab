"""Channel permutations: folded into weights if possible, else one kernel, and nothing left to PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade.engine.capture.export import capture
from escalade.engine.passes import optimize
from escalade.models import settle
from tests.bench.coverage.networks import Classified, Shuffled, conv
from tests.engine.plan.test_subbuffers import Model, copies, planned

SHAPE = (3, 16, 16)


class Halved(nn.Module):
    """Two branches that halve the image, then interleaved."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        half = width // 2
        self.short = nn.Sequential(
            conv(channels, channels, 3, 2, groups=channels, activation=None), conv(channels, half, 1)
        )
        self.long = nn.Sequential(
            conv(channels, half, 1), conv(half, half, 3, 2, groups=half, activation=None), conv(half, half, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat((self.short(x), self.long(x)), 1)
        batch, channels, height, width = y.shape
        groups = y.view(batch, 2, channels // 2, height * width)
        return groups.permute(0, 2, 1, 3).contiguous().view(y.shape)


class Grouped(nn.Module):
    """Grouped 1x1 convolutions with a channel shuffle in between."""

    def __init__(self, width: int, groups: int, stride: int) -> None:
        super().__init__()
        self.before, self.shuffle = conv(width, width, 1, groups=groups), nn.ChannelShuffle(groups)
        self.depthwise = conv(width, width, 3, stride, groups=width, activation=None)
        self.behind = conv(width, width, 1, groups=groups, activation=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.behind(self.depthwise(self.shuffle(self.before(x))))
        return F.relu(x + y) if y.shape == x.shape else torch.cat((F.avg_pool2d(x, 3, 2, 1), y), 1)


def by_halves(width: int) -> nn.Module:
    blocks = (Halved(16, width), Shuffled(width), Shuffled(width), Halved(width, 2 * width))
    return Classified(32, conv(3, 16), *blocks, conv(2 * width, 32, 1))


def by_groups() -> nn.Module:
    return Classified(48, conv(3, 24), Grouped(24, 3, 1), Grouped(24, 3, 2))


def kinds(model: nn.Module, shape: tuple[int, ...] = SHAPE, dtype: str = "fp16") -> list[str]:
    graph = optimize(capture(model.eval(), (torch.randn(2, *shape),)), dtype)
    return [node.op for node in graph]


def agree(model: nn.Module, device: str, dtype: str, shape: tuple[int, ...] = SHAPE) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, *shape)
    settle(model, x)
    found = escalade.compile(model.eval(), x, dtype=dtype, device=device)(x)
    torch.testing.assert_close(found, model(x).detach(), rtol=1e-2, atol=1e-2 if dtype == "fp16" else 1e-4)


@pytest.mark.parametrize(
    ("make", "device", "dtype"),
    [
        (lambda: by_halves(20), "twin", "fp16"),
        (lambda: by_halves(20), "cpu", "fp32"),
        (by_groups, "twin", "fp16"),
    ],
    ids=["halves", "halves in fp32", "groups"],
)
def test_networks_that_shuffle_are_right(make: Callable[[], nn.Module], device: str, dtype: str) -> None:
    agree(make(), device, dtype)


def test_a_passed_on_half_is_moved_once_and_the_rest_is_folded_into_weights() -> None:
    """Also with 10 channels, too misaligned for wide accesses: 16 of them are aligned."""
    for width in (20, 32):
        model = by_halves(width)
        found = kinds(model)
        assert found.count("shuffle") == 2  # per block that passes half of its channels on
        assert not {"slice", "permute", "reshape", "aten"} & {*found[:-2]}
        assert not any(step.in_pytorch for step in planned(model, SHAPE, "fp16").steps)
    assert not copies(planned(by_halves(32), SHAPE, "fp16"))


def test_layers_between_have_channels_that_fill_up_an_access() -> None:
    """29 channels, half of 58, are padded to 32 between layers."""
    graph = optimize(capture(by_halves(58).eval(), (torch.randn(2, *SHAPE),)), "fp16")
    made = [node.shape[1] for node in graph if node.op in ("conv2d", "shuffle", "concatenate")]
    assert 64 in made and all(isinstance(width, int) and not width % 8 for width in made)
    agree(by_halves(58), "cpu", "fp16")


def test_groups_are_dealt_out_where_the_image_is_smallest() -> None:
    graph = optimize(capture(by_groups().eval(), (torch.randn(2, *SHAPE),)), "fp16")
    shuffles = [node.shape[2:] for node in graph if node.op == "shuffle"]
    assert shuffles == [(16, 16), (8, 8)]


def _shuffled(x: torch.Tensor) -> torch.Tensor:
    return F.channel_shuffle(x, 4)


@pytest.mark.parametrize(
    "between",
    [
        nn.Identity(),
        nn.BatchNorm2d(16),
        nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2)),
        nn.Sequential(nn.AvgPool2d(2), nn.PReLU(16)),
        nn.Conv2d(16, 16, 3, 2, 1, groups=16),
    ],
    ids=["nothing", "norm", "pool", "pointwise", "depthwise"],
)
def test_channelwise_nodes_pass_a_channel_order_on(between: nn.Module) -> None:
    model = Model(
        lambda x, between, last: last(between(_shuffled(x.sin()))), between=between, last=nn.Conv2d(16, 8, 3)
    )
    assert "shuffle" not in kinds(model, (16, 10, 10))
    agree(model, "cpu", "fp32", (16, 10, 10))


def test_earlier_filters_take_a_channel_order_that_no_reader_takes() -> None:
    model = Model(
        lambda x, first, last: last(_shuffled(first(x))),
        first=nn.Conv2d(8, 16, 1),
        last=nn.Conv2d(16, 16, 3, groups=4),
    )
    assert "shuffle" not in kinds(model, (8, 6, 6))
    agree(model, "cpu", "fp32", (8, 6, 6))


def test_an_order_within_groups_is_left_to_their_weights() -> None:
    def within(x: torch.Tensor, last: nn.Module) -> torch.Tensor:
        low, high = x.sin().chunk(2, 1)
        return last(torch.cat((F.channel_shuffle(low, 2), F.channel_shuffle(high, 2)), 1))

    agree(Model(within, last=nn.Conv2d(16, 16, 1, groups=2)), "cpu", "fp32", (16, 6, 6))


def test_results_are_in_the_order_of_the_model() -> None:
    model = Model(
        lambda x, first: (_shuffled(first(x)), _shuffled(x)[:, 3:9]), first=nn.Conv2d(16, 16, 1, groups=2)
    )
    torch.manual_seed(0)
    x = torch.randn(2, 16, 5, 5)
    for found, expected in zip(escalade.compile(model.eval(), x, device="twin")(x), model(x), strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-4)


def test_zero_filters_are_not_multiplied_by_infinity() -> None:
    """Padded channels are only for readers that multiply them with zero."""

    def joined(x: torch.Tensor, **layers: nn.Module) -> torch.Tensor:
        parts = [torch.log(layers[name](x).abs()) for name in ("left", "right")]
        return layers["last"](F.channel_shuffle(torch.cat(parts, 1), 2).chunk(2, 1)[1])

    layers = {name: nn.Conv2d(8, 10, 1) for name in ("left", "right")}
    agree(Model(joined, **layers, last=nn.Conv2d(10, 8, 1)), "cpu", "fp32", (8, 6, 6))
