"""Layers over values of other ranks than an image's, and images that stay in PyTorch's order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm

from escalade.engine.compiler import compile
from escalade_bench.coverage.fallbacks import planned

NORMS = [
    (torch.nn.GroupNorm(4, 8), (3, 8)),
    (torch.nn.GroupNorm(2, 8), (2, 8, 5)),
    (torch.nn.GroupNorm(2, 8), (2, 8, 3, 5)),
    (torch.nn.InstanceNorm3d(4), (2, 4, 3, 2, 5)),
    (torch.nn.BatchNorm1d(8), (3, 8)),
    (torch.nn.BatchNorm1d(6), (3, 6, 5)),
    (torch.nn.BatchNorm3d(4), (2, 4, 3, 2, 5)),
    (torch.nn.MaxPool2d(3, 2, 1), (2, 4, 7, 6)),
    (torch.nn.MaxPool2d((9, 10), 1, (1, 2)), (2, 5, 7, 6)),
    (torch.nn.AdaptiveMaxPool2d(1), (2, 5, 7, 6)),
    (torch.nn.AvgPool2d(3, 2, 1), (2, 4, 7, 6)),
]


def _settled(layer: torch.nn.Module) -> torch.nn.Module:
    """The layer with constants as training leaves them, not ones and zeros."""
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 1.5) if name != "bias" else tensor.data.normal_()
    return layer.eval()


@pytest.mark.parametrize(("layer", "shape"), NORMS)
def test_a_layer_by_itself_is_one_step_as_the_values_lie(
    layer: torch.nn.Module, shape: tuple[int, ...]
) -> None:
    model, x = _settled(layer), torch.randn(shape)
    engine = compile(model, x, device="twin")
    (step,) = engine.explain(x).steps
    assert step.rung and step.rung != "PyTorch"
    torch.testing.assert_close(engine(x), model(x))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_maximum_of_a_whole_image_is_a_reduction(layout: torch.memory_format) -> None:
    """Not a thread for each channel, which goes through all pixels."""
    x = torch.randn(2, 8, 7, 6).to(memory_format=layout)
    for layer in (torch.nn.AdaptiveMaxPool2d(1), torch.nn.MaxPool2d((9, 10), 1, (1, 2))):
        (step,) = compile(layer, x, device="twin").explain(x).steps
        assert step.rung in ("rows", "columns")
    (step,) = compile(torch.nn.MaxPool2d(3, 2), x, device="twin").explain(x).steps
    assert step.rung not in ("rows", "columns")


def test_long_rows_are_shared_among_blocks() -> None:
    model = _settled(torch.nn.LayerNorm((3, 64, 256)))
    x = torch.randn(2, 3, 64, 256)
    engine = compile(model, x, device="cpu")
    assert [step.rung for step in planned(engine, x).steps if step.launches] == ["clustered"]
    torch.testing.assert_close(engine(x), model(x))


class Sequences(torch.nn.Module):
    """A small network of sequences, in which everything has one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.front = torch.nn.Conv1d(3, 8, 5, stride=2, padding=2)
        self.norm = torch.nn.BatchNorm1d(8)
        self.inner = torch.nn.Conv1d(8, 8, 3, padding="same", groups=2, dilation=2)
        self.gated = weight_norm(
            torch.nn.Conv1d(8, 16, 2, dilation=2)
        )  # a weight that is computed at each call
        self.scale = torch.nn.Parameter(torch.randn(8, 1))
        self.back = weight_norm(torch.nn.ConvTranspose1d(8, 4, 4, stride=2, padding=1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(self.norm(self.front(x)))
        left, right = self.gated(F.pad(y, (2, 0))).chunk(2, 1)  # as WaveNet does: what has been, and gates
        y = torch.cat([y[:, 4:], y[:, :4]], 1) + torch.tanh(left) * torch.sigmoid(right)
        y = y * torch.sigmoid(y.amax(2, keepdim=True)) + F.pad(y, (1, 1), mode="reflect")[..., 1:-1]
        y = F.max_pool1d(y + torch.tanh(self.inner(y)) * self.scale, 3, 1, 1)
        means = F.adaptive_avg_pool1d(y, 1) + F.adaptive_max_pool1d(y, 1)
        return F.avg_pool1d(self.back(y), 4, 2, 1), means.flatten(1)


def test_layers_of_sequences_are_those_of_images() -> None:
    model, x = _settled(Sequences()), torch.randn(2, 3, 24)
    engine = compile(model, x, device="twin")
    explained = engine.explain(x)
    assert not explained.fallbacks
    # In front of all and behind it, and two halves that change places at once.
    kernels = [step.kernels[0].split("/")[0] for step in explained.steps if step.kernels]
    assert (kernels.count("convert"), kernels.count("copy")) == (2, 1)
    for given in (x, x[:1]):
        torch.testing.assert_close(engine(given), model(given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("layer", "item"),
    [
        (torch.nn.Conv2d(3, 4, (4, 3), padding="same", dilation=(1, 2)), (3, 7, 8)),
        (torch.nn.Conv2d(4, 4, (2, 6), padding="same", groups=4), (4, 5, 9)),
        (weight_norm(torch.nn.Conv1d(3, 4, 4, padding="same")), (3, 9)),
    ],
)
def test_the_same_size_may_take_more_zeros_behind_an_image_than_in_front_of_it(
    layer: torch.nn.Module, item: tuple[int, ...]
) -> None:
    model, x = torch.nn.Sequential(layer, torch.nn.ReLU()).eval(), torch.randn(2, *item)
    engine = compile(model, x, device="cpu")
    assert not planned(engine, x).fallbacks
    torch.testing.assert_close(engine(x), model(x))


class Picked(torch.nn.Module):
    """The last step of a sequence, and a row and a column of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.along, self.image = torch.nn.Conv1d(3, 8, 3), torch.nn.Conv2d(3, 8, 3)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.image(x[:, :, None].expand(-1, -1, 5, -1))
        return self.head(torch.relu(self.along(x))[:, :, -1]), y[:, :, 1], y.select(3, -2), y[:, :, :1, 0]


def test_a_step_of_a_sequence_is_taken_where_it_lies() -> None:
    model, x = Picked().eval(), torch.randn(2, 3, 9)
    engine = compile(model, x, dtype="fp16", device="cpu")
    assert {step.operation for step in planned(engine, x).fallbacks} <= {"aten::expand"}
    torch.testing.assert_close(engine(x), model(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("behind", "steps"),
    [
        (torch.nn.Identity(), ["conv2d"]),
        (torch.nn.GELU(), ["conv2d", "pointwise"]),
        (torch.nn.Conv2d(6, 3, 3), ["convert", "conv2d", "conv2d", "convert"]),
    ],
)
def test_a_convolution_of_pixels_by_itself_stays_in_pytorchs_order(
    behind: torch.nn.Module, steps: list[str]
) -> None:
    model, x = torch.nn.Sequential(torch.nn.Conv2d(8, 6, 1), behind).eval(), torch.randn(2, 8, 4, 5)
    engine = compile(model, x, dtype="tf32", device="cpu")
    explained = planned(engine, x)
    assert [step.operation for step in explained.steps] == steps
    assert len(explained.fallbacks) == (len(steps) < 3)
    torch.testing.assert_close(engine(x), model(x))
