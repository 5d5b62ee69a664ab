"""Models quantized by PyTorch's own tools: their scales become those of the kernels."""

from __future__ import annotations

import pathlib

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators that exported models call
from torch import nn

import escalade
from escalade.engine.nodes.convert import FakeQuantize
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import STORAGE

pytestmark = pytest.mark.usefixtures("all_in_8_bits")
OPS = torch.ops.quantized_decomposed
CODES = (-128, 127, torch.int8)


def largest_row(weight: torch.Tensor) -> torch.Tensor:
    return weight.flatten(1).abs().amax(1)


class Quantized(nn.Module):
    """A stem, a residual block and a head, as exported: every value is quantized and dequantized."""

    def __init__(self, zero_point: int = 0, constant: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.zero_point = zero_point
        stem, first, second = (torch.randn(32, size, 3, 3) / (3 * size**0.5) for size in (3, 32, 32))
        for name, weight in (("stem", stem), ("first", first), ("second", second)):
            # The largest code of some filters is 100, which no 8-bit scheme would choose by itself.
            scales = largest_row(weight) / torch.where(torch.arange(32) % 2 == 0, 100.0, 127.0)
            codes = torch.round(weight / scales.view(-1, 1, 1, 1)).to(torch.int8)
            self.register_buffer(f"{name}_codes", codes)
            self.register_buffer(f"{name}_scales", scales)
        self.register_buffer("zeros", torch.zeros(32, dtype=torch.int64))
        self.bias = nn.Parameter(torch.randn(32) / 4)
        self.head = nn.Linear(32, 7)

    def weight(self, name: str) -> torch.Tensor:
        codes, scales = getattr(self, f"{name}_codes"), getattr(self, f"{name}_scales")
        found: torch.Tensor = OPS.dequantize_per_channel(codes, scales, self.zeros, 0, -127, 127, torch.int8)
        return found

    def through(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        codes = OPS.quantize_per_tensor(x, scale, self.zero_point, *CODES)
        found: torch.Tensor = OPS.dequantize_per_tensor(codes, scale, self.zero_point, *CODES)
        return found

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(
            nn.functional.conv2d(self.through(image, 0.03), self.weight("stem"), self.bias, padding=1)
        )
        x = self.through(x, 0.02)
        y = self.through(torch.relu(nn.functional.conv2d(x, self.weight("first"), padding=1)), 0.025)
        y = self.through(nn.functional.conv2d(y, self.weight("second"), padding=1), 0.03)
        y = self.through(torch.relu(y + x), 0.04)
        result: torch.Tensor = self.head(y.mean((2, 3)))
        return result


class FakeQuantized(nn.Module):
    """Two convolutions with PyTorch's fake quantization, as in quantization-aware training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.stem, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.register_buffer("scale", torch.tensor([0.03]))
        self.register_buffer("zero", torch.tensor([0], dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.fake_quantize_per_tensor_affine(
            torch.relu(self.stem(x)), self.get_buffer("scale"), self.get_buffer("zero"), -128, 127
        )
        weight = self.second.weight
        scales = (largest_row(weight) / 127).detach()
        weight = torch.fake_quantize_per_channel_affine(
            weight, scales, torch.zeros(32, dtype=torch.int32), 0, -127, 127
        )
        return nn.functional.conv2d(x, weight, self.second.bias, padding=1)


@pytest.fixture(scope="module")
def image() -> torch.Tensor:
    return torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def test_scales_are_those_of_the_model(image: torch.Tensor) -> None:
    model = Quantized().eval()
    engine = escalade.compile(model, image, dtype="int8", device="twin")
    plan = engine.plan(image)
    assert not [step for step in plan.steps if step.node.op in ("aten", FakeQuantize.name, "quantise")]
    convolutions = [step.node for step in plan.steps if step.node.op == "conv2d"]
    assert [node.attributes["quantized"] for node in convolutions] == ["int8", "int8"]
    assert [plan.forms[node.name].dtype for node in convolutions] == [STORAGE["int8"]] * 2
    first, second = convolutions
    constants = plan.graph.constants
    for node, name, x_scale in ((first, "first", 0.02), (second, "second", 0.025)):
        codes = constants[node.inputs["weight"]]
        assert torch.equal(codes.round(), getattr(model, f"{name}_codes").float()), "weights keep their codes"
        assert torch.allclose(codes, codes.round(), atol=1e-3)
        scales = getattr(model, f"{name}_scales") * x_scale
        assert torch.allclose(constants[node.inputs["scale"]], scales, rtol=1e-5)
    assert torch.allclose(constants[first.inputs["scales"]][1], torch.tensor(1 / 0.025))
    assert torch.allclose(constants[second.inputs["scales"]], torch.tensor([0.02, 1 / 0.04]))
    with torch.no_grad():
        expected = model(image)
    assert float((engine(image) - expected).norm() / expected.norm()) < 0.02


def test_other_dtypes_match_the_model(image: torch.Tensor, tmp_path: pathlib.Path) -> None:
    model = Quantized(zero_point=-20).eval()
    engine = escalade.compile(model, image, device="cpu")
    with torch.no_grad():
        expected = model(image)
    assert torch.allclose(engine(image), expected, atol=2e-3)
    engine.save(tmp_path / "quantized.escalade")
    assert torch.equal(escalade.load(tmp_path / "quantized.escalade", device="cpu")(image), engine(image))


def test_zero_points_become_symmetric_ranges(image: torch.Tensor, tmp_path: pathlib.Path) -> None:
    model = Quantized(zero_point=-20).eval()
    engine = escalade.compile(model, image, dtype="int8", device="cpu")
    ranges = {layer.source or layer.name: layer.range for layer in engine.calibration_report().layers}
    assert sorted(ranges.values())[0] == pytest.approx(0.02 * 147)
    assert any("zero points" in note for note in engine.explain(image).notes)
    with torch.no_grad():
        expected = model(image)
    assert float((engine(image) - expected).norm() / expected.norm()) < 0.05
    engine.save(tmp_path / "quantized.escalade")
    again = escalade.load(tmp_path / "quantized.escalade", device="cpu")
    assert torch.equal(again(image), engine(image))


def test_fake_quantization_has_the_same_scales(image: torch.Tensor) -> None:
    model = FakeQuantized().eval()
    engine = escalade.compile(model, torch.randn(2, 3, 64, 64), dtype="int8", device="cpu")
    big = torch.randn(2, 3, 64, 64)
    node = next(step.node for step in engine.plan(big).steps if step.node.op == "conv2d")
    assert node.attributes["quantized"] == "int8"
    scales = largest_row(model.second.weight.detach()) / 127 * 0.03
    assert torch.allclose(engine.plan(big).graph.constants[node.inputs["scale"]], scales, rtol=1e-5)
    with torch.no_grad():
        expected = model(big)
    assert float((engine(big) - expected).norm() / expected.norm()) < 0.01


def test_a_model_without_scales_needs_calibration(image: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError, match="needs calibration=batches"):
        escalade.compile(nn.Conv2d(3, 32, 3).eval(), image, dtype="int8", device="cpu")
