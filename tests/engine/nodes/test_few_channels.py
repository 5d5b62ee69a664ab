"""Convolutions of few channels as one step: which are matched, how images are read, and unchanged results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade import models
from escalade.engine import compile
from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.graph.graph import Graph
from escalade.engine.passes import optimize

TOLERANCE = {"fp32": 1e-5, "tf32": 2e-3, "fp16": 5e-3, "bf16": 4e-2}


class Convolved(nn.Module):
    def __init__(self, conv: nn.Conv2d, *behind: nn.Module) -> None:
        super().__init__()
        self.conv = conv
        self.behind = nn.Sequential(*behind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.behind(self.conv(x))


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.detach().double()
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_lenet_is_three_steps(dtype: str) -> None:
    model, x = models.model("lenet")
    plan = Engine(capture(model, (x,)), dtype, "cpu").plan(x)
    assert [step.node.op for step in plan.steps if not step.is_alias] == [
        "few_channels",
        "few_channels",
        "mlp",
    ]
    assert [step.node.op for step in plan.steps if step.is_alias] == ["reshape"]
    names = [step.lowered.problem.name for step in plan.steps if step.lowered]
    image = "" if dtype in ("fp32", "tf32") else "_fp32"
    assert names == [
        f"1to4_86_k7_b1{image}_relu_pool2", "4to16_40_k7_b1_relu_pool4c", "1296-32br_32-10b_b1",
    ]  # fmt: skip


RELU, POOL = nn.ReLU(), nn.MaxPool2d(2)


@pytest.mark.parametrize(
    ("model", "attributes"),
    [
        (Convolved(nn.Conv2d(1, 5, 3)), (False, 1, False)),
        (Convolved(nn.Conv2d(3, 12, (3, 5), padding=(1, 2)), RELU), (True, 1, False)),
        (Convolved(nn.Conv2d(4, 32, 3, bias=False), RELU, nn.MaxPool2d(3, ceil_mode=True)), (True, 3, True)),
        (Convolved(nn.Conv2d(2, 4, 3), POOL, RELU), (True, 2, False)),  # the order does not matter
        (Convolved(nn.Conv2d(1, 4, 3), RELU, POOL, RELU), (True, 2, False)),
        (Convolved(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), RELU, POOL), (True, 2, False)),
    ],
)
def test_convolutions_that_are_caught(model: Convolved, attributes: tuple[bool, int, bool]) -> None:
    model.eval()
    x = torch.randn(2, model.conv.in_channels, 9, 11)
    graph = capture(model, (x,))
    done = optimize(graph, "fp32")
    direct = model.conv.in_channels == 1
    assert ops(done)[: 1 if direct else 2] == (["few_channels"] if direct else ["convert", "few_channels"])
    (node,) = (node for node in done if node.op == "few_channels")
    assert tuple(node.attributes[key] for key in ("relu", "pool", "ceil_mode")) == attributes
    assert not {"relu", "max_pool2d", "conv2d"} & set(ops(done))
    with torch.no_grad():
        torch.testing.assert_close(Engine(graph, "fp32", "cpu")(x), model(x))


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(5, 8, 3),
        nn.Conv2d(3, 33, 3),
        nn.Conv2d(3, 8, 3, stride=2),
        nn.Conv2d(3, 8, 3, dilation=2),
        nn.Conv2d(4, 8, 3, groups=2),
    ],
)
def test_convolutions_that_are_not_caught(conv: nn.Conv2d) -> None:
    graph = capture(Convolved(conv, RELU).eval(), (torch.randn(1, conv.in_channels, 9, 9),))
    assert "few_channels" not in ops(optimize(graph, "fp32"))


@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(3, 2), nn.MaxPool2d((2, 3)), nn.MaxPool2d(2, padding=1), nn.AvgPool2d(2)]
)
def test_other_pools_stay_behind(pool: nn.Module) -> None:
    model = Convolved(nn.Conv2d(1, 4, 3), RELU, pool).eval()
    x = torch.randn(2, 1, 8, 8)
    graph = capture(model, (x,))
    assert "few_channels" in ops(optimize(graph, "fp32")) and len(ops(optimize(graph, "fp32"))) > 1
    with torch.no_grad():
        torch.testing.assert_close(Engine(graph, "fp32", "cpu")(x), model(x))


def test_values_read_elsewhere_are_kept() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            y = F.relu(self.conv(x))
            return F.max_pool2d(y, 2), y.sum(1), x * 2

    model, x = Both().eval(), torch.randn(2, 1, 8, 8)
    for dtype in ("fp32", "fp16"):
        graph = capture(model, (x,))
        assert {"few_channels", "max_pool2d", "convert"} <= set(ops(optimize(graph, dtype)))
        for device in ("cpu", "twin"):
            for found, expected in zip(Engine(graph, dtype, device)(x), model(x), strict=True):
                assert difference(found, expected) <= TOLERANCE[dtype]


def test_the_stem_fuses_activation_and_pool() -> None:
    graph = capture(Convolved(nn.Conv2d(3, 16, 3), RELU, POOL).eval(), (torch.randn(1, 3, 9, 9),))
    assert ops(optimize(graph, "fp16")) == ["stem", "convert"]
    assert ops(optimize(graph, "fp32")) == ["convert", "few_channels", "convert"]


@pytest.mark.share(7)
@pytest.mark.parametrize("image", [torch.uint8, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("padding", [0, 1])
def test_gray_values_are_normalized_by_the_weights(padding: int, bias: bool, image: torch.dtype) -> None:
    torch.manual_seed(12)
    model = Convolved(nn.Conv2d(1, 4, 3, padding=padding, bias=bias), RELU, POOL).eval()
    x = torch.randint(0, 256, (2, 1, 9, 11), dtype=torch.uint8).to(image)
    mean, std = 0.3, 0.6
    with torch.no_grad():
        expected = model((x.float() / 255 - mean) / std)
    for dtype in ("fp32", "fp16"):
        for device in ("cpu", "twin"):
            engine = compile(model, x, dtype=dtype, device=device, normalize=((mean,), (std,)))
            first = engine.plan(x).steps[0]
            assert first.node.op == ("convert" if padding else "few_channels")
            assert difference(engine(x), expected) <= TOLERANCE[dtype]


def test_gray_values_without_offset_need_no_bias() -> None:
    model, _ = models.model("lenet")
    x = torch.randint(0, 256, (2, 1, 86, 86), dtype=torch.uint8)
    engine = compile(model, x, dtype="fp16", device="cpu", normalize=((0.0,), (1 / 255,)))
    first = engine.plan(x).steps[0]
    assert first.lowered is not None and first.lowered.problem.name == "1to4_86_k7_b2_uint8_relu_pool2"
    with torch.no_grad():
        assert difference(engine(x), model(x.float())) <= TOLERANCE["fp16"]


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_every_type_and_layout(channels: int, dtype: str) -> None:
    torch.manual_seed(13)
    model = Convolved(nn.Conv2d(channels, 4, 3, bias=False), RELU, POOL).eval()
    x = torch.randn(2, channels, 9, 12).bfloat16().float()  # the same in every dtype
    graph = capture(model, (x,))
    twin, cpu = Engine(graph, dtype, "twin"), Engine(graph, dtype, "cpu")
    for each in (x, x.half(), x.bfloat16(), x.contiguous(memory_format=torch.channels_last)):
        with torch.no_grad():
            expected = model(x)
        assert difference(cpu(each), expected) <= TOLERANCE[dtype]
        assert difference(twin(each), expected) <= TOLERANCE[dtype]


def test_fp8_leaves_them_alone() -> None:
    torch.manual_seed(14)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 16, 8), nn.ReLU(), nn.Linear(8, 4),
    ).eval()  # fmt: skip
    model[0] = nn.Conv2d(1, 16, 3, bias=False)  # the stem does not support it
    x = torch.randn(8, 1, 14, 14)
    engine = compile(model, x, dtype="fp8", device="cpu", calibration=[x])
    found = [(step.node.op, step.lowered.problem.dtype) for step in engine.plan(x).steps if step.lowered]
    assert found[0] == ("few_channels", "fp16") and found[-1] == ("mlp", "fp16")
    with torch.no_grad():
        assert difference(engine(x), model(x)) < 0.1
