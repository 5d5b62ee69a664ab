"""Layers over values of other ranks than an image's, and images that stay in NCHW."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm

from escalade.engine.compiler import compile
from escalade_bench.networks.plans import planned
from tests.engine.nodes.test_operators import Call

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
    """The layer with constants as after training, not ones and zeros."""
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 1.5) if name != "bias" else tensor.data.normal_()
    return layer.eval()


@pytest.mark.parametrize(("layer", "shape"), NORMS)
def test_a_lone_layer_is_one_step_in_the_layout_of_its_values(
    layer: torch.nn.Module, shape: tuple[int, ...]
) -> None:
    model, x = _settled(layer), torch.randn(shape)
    engine = compile(model, x, device="twin")
    (step,) = engine.explain(x).steps
    assert step.rung and step.rung != "PyTorch"
    torch.testing.assert_close(engine(x), model(x))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_maximum_of_a_whole_image_is_a_reduction(layout: torch.memory_format) -> None:
    """Not one thread per channel that loops over all pixels."""
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
    """A small network of sequences, where all layers are one-dimensional."""

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
        left, right = self.gated(F.pad(y, (2, 0))).chunk(2, 1)  # as in WaveNet: causal convolutions and gates
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
    # Before and after all others, and two swapped halves.
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


def test_a_step_of_a_sequence_is_read_in_place() -> None:
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
    engine = compile(model, x, dtype="fp32", device="cpu")
    explained = planned(engine, x)
    assert [step.operation for step in explained.steps] == steps
    assert len(explained.fallbacks) == (len(steps) < 3)
    torch.testing.assert_close(engine(x), model(x))


WEIGHTS = torch.randn(64, generator=torch.Generator().manual_seed(0)) / 8


def weights(x: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Constants in the dtype of x, of which the graph knows after folding only."""
    return WEIGHTS.to(x.device, x.dtype).view(sizes)


COMPOSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "gated half": (lambda x: F.glu(x, 1), (2, 6, 3, 5)),
    "gated half of the last dimension": (F.glu, (2, 3, 2, 8)),
    "response normalization": (lambda x: F.local_response_norm(x, 5), (2, 7, 3, 4)),
    "response normalization over an even number": (lambda x: F.local_response_norm(x, 4, k=2.0), (2, 9, 5)),
    "mean of frames": (lambda x: F.avg_pool3d(x, (3, 1, 1), 2, (1, 0, 0), ceil_mode=True), (2, 3, 6, 3, 4)),
    "mean of cuboids": (lambda x: F.avg_pool3d(x, 3, 2, 1, count_include_pad=False), (2, 3, 5, 4, 6)),
    "sum of frames": (lambda x: F.avg_pool3d(x, (2, 1, 1), 1, divisor_override=1), (2, 3, 4, 2, 3)),
    "mean of everything": (lambda x: F.adaptive_avg_pool3d(x, 1), (2, 3, 4, 3, 2)),
    "maximum of cuboids": (lambda x: F.max_pool3d(x, (3, 2, 3), (2, 1, 2), (1, 1, 0)), (2, 3, 5, 4, 6)),
    "maximum of frames": (lambda x: F.max_pool3d(x, (3, 1, 1), (2, 1, 1), dilation=(2, 1, 1)), (2, 1, 9, 3, 4)),
    "zeros between channels": (lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)), (2, 4, 3, 5)),
    "fewer channels": (lambda x: F.pad(x, (0, 1, 2, 0, -1, 2), value=3.0), (2, 4, 3, 5)),
    "an image among channels": (lambda x: F.pad(x, (0, 1, 2, 0, 2, 1), value=3.0), (2, 4, 3, 5)),
    "frames around": (lambda x: F.pad(x, (1, 2, 0, 1, 2, 0)), (2, 3, 4, 3, 5)),
    "rows and columns of a matrix": (lambda x: F.pad(x, (1, 0, -1, 2)), (2, 4, 5)),
    "windows": (lambda x: F.unfold(x, (3, 2), dilation=(1, 2), padding=(1, 2), stride=(2, 1)), (2, 3, 5, 6)),
    "patches and back": (lambda x: F.fold(F.unfold(x, 2, stride=2).sin(), (4, 6), 2, stride=2), (2, 3, 4, 6)),
    "longer sequence": (lambda x: F.interpolate(x, scale_factor=1.7, mode="linear"), (2, 3, 7)),
    "repeated sequence": (lambda x: F.interpolate(x, size=12), (2, 3, 5)),
    "cosine": (lambda x: F.cosine_similarity(x, x.flip(3), 1), (2, 6, 3, 5)),
    "variance and mean": (lambda x: torch.cat(torch.var_mean(x, (2, 3)), 1), (2, 4, 3, 5)),
    "deviation": (lambda x: torch.std_mean(x, 1, keepdim=True)[0], (2, 4, 3)),
    "range": (lambda x: torch.cat([*torch.aminmax(x, dim=1)], 1), (2, 5, 3)),
    "mean of groups": (lambda x: x.mean((1, 3)), (2, 3, 4, 5, 3)),
    "largest of groups": (lambda x: x.amax((2, 4), keepdim=True) + x, (2, 3, 4, 5, 3)),
    "deviation of groups": (lambda x: x.std((1, 3), keepdim=True), (2, 3, 4, 5)),
    "variance of groups": (lambda x: x.var((1, 2, 4)), (2, 3, 4, 5, 3)),
    "norm of a matrix": (lambda x: x / torch.linalg.matrix_norm(x, keepdim=True), (2, 3, 4, 5)),
    "norm of a vector": (lambda x: torch.linalg.norm(x, 1, dim=1), (2, 3, 4)),
    "weighted sum of splits": (
        lambda x: torch.einsum("brchw,brc->bchw", x, x.mean((3, 4)).softmax(1)), (2, 3, 4, 3, 2),
    ),
    "weights first, and transposed": (
        lambda x: torch.einsum("wb,bchw->whb", x.mean((1, 2)).mT.exp(), x), (2, 4, 3, 5),
    ),
    "gate": (lambda x: torch.einsum("bchw, bc -> bchw", x, x.mean((2, 3))), (2, 4, 3, 5)),
    "frames": (
        lambda x: F.conv3d(x, weights(x, 4, 2, 1, 2, 4)[..., :3], None, (1, 2, 1), (0, 1, 2)), (2, 2, 3, 5, 4),
    ),
    "along frames": (
        lambda x: F.conv3d(x, weights(x, 8, 2, 4, 1, 1), None, (2, 1, 1), (3, 0, 0), (2, 1, 1), 2).relu(),
        (2, 4, 5, 3, 2),
    ),
    "residual of frames": (
        lambda x: x + F.silu(F.conv3d(F.conv3d(x, weights(x, 8, 8, 1, 1, 1)), weights(x, 8, 8, 1, 1, 1))),
        (2, 8, 2, 3, 4),
    ),
    "weights of pixels": (lambda x: torch.einsum("bchw,cd->bdhw", x, weights(x, 8, 8)), (2, 8, 3, 4)),
    "weights of two dimensions": (
        lambda x: torch.einsum("bkcv,kvw->bcw", x, weights(x, 2, 4, 8)), (2, 2, 3, 4),
    ),
    "a matrix in front": (lambda x: weights(x, 8, 8) @ x, (2, 3, 8, 5)),
    "weights over any dimensions": (
        lambda x: torch.tensordot(x, weights(x, 4, 2, 8), dims=((2, 1), (0, 1))), (2, 2, 4, 3),
    ),
    "tiles": (lambda x: x.tile(2, 1, 3), (2, 4, 3, 5)),
    "in the shape of another": (lambda x: (x.flatten(2).softmax(-1).view_as(x) * x).mT, (2, 4, 3, 5)),
}  # fmt: skip


@pytest.mark.share(7)
@pytest.mark.parametrize("name", COMPOSED)
def test_operators_that_others_express_leave_nothing_to_pytorch(name: str) -> None:
    function, shape = COMPOSED[name]
    model = Call(lambda x: function(x.sin()))
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(shape).to(dtype)
        exact = model(x.double())
        # Up to eight roundings to the dtype, one per step.
        most = 4 * torch.finfo(dtype).eps * float(exact.abs().max())
        engine = compile(model, x.float(), dtype=dtype, device="twin")
        assert not engine.explain(x.float()).fallbacks
        torch.testing.assert_close(engine(x.float()).double(), exact, rtol=0, atol=most)
        one = compile(model, x.float(), dtype=dtype, device="cpu")(x[:1].float())
        torch.testing.assert_close(one.double(), model(x[:1].double()), rtol=0, atol=most)
