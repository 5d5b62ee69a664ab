"""INT8 on the GPU: layers against exact sums, and whole networks against fp32."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import pytest
import torch

import escalade
from escalade import models
from escalade.device.run import bind
from escalade.models import settle
from escalade.ops import OPERATIONS
from escalade.ops.base.card import Card
from escalade.ops.base.draw import Draw
from escalade.ops.conv2d import Conv2dProblem
from escalade.ops.conv2d.reference import empty_output, exact, peer, random_inputs

pytestmark = pytest.mark.gpu

_BASE = Conv2dProblem.square(64, 64, 56, 3, batch=4, dtype="int8", layout="nhwc", bias=True, relu=True)
LAYERS = [
    replace(_BASE, residual=True),
    replace(_BASE, channels=128, filters=128, height=28, width=28, residual=True),
    replace(_BASE, channels=64, filters=128, stride=(2, 2)),
    replace(
        _BASE, channels=128, filters=128, height=28, width=28, shortcut_channels=64, shortcut_stride=2,
        shortcut_size=(56, 56),
    ),
    replace(_BASE, channels=512, filters=512, height=7, width=7, batch=1, output="fp16"),
    replace(_BASE, channels=512, filters=512, height=7, width=7, batch=33),
    replace(_BASE, channels=256, filters=64, filter_height=1, filter_width=1, padding=(0, 0)),
    replace(_BASE, channels=64, filters=256, filter_height=1, filter_width=1, padding=(0, 0), residual=True),
    replace(_BASE, channels=144, filters=80, height=13, width=17, residual=True),
]  # fmt: skip


@pytest.mark.parametrize("problem", LAYERS, ids=lambda problem: problem.name)
def test_every_config_is_exact(problem: Conv2dProblem, cuda: torch.device) -> None:
    """All s32 sums are exact, so results differ from the reference only where fp32 rounding decides a tie."""
    inputs = random_inputs(problem, Draw(cuda, 3))
    powers = {
        "scale": torch.full_like(inputs["scale"], 2.0**-16),
        "scales": inputs["scales"].new_tensor([2.0**-6, 32]),
    }
    inputs |= powers
    expected = peer(problem, inputs)
    operation, seen = OPERATIONS["conv2d"], 0
    for rung in (rung.on(Card.of(cuda)) for rung in operation.ladder):
        for config in rung.configs(problem) if rung.supports(problem) is None else ():
            recipe = rung.recipe(problem, config)
            spaces = {workspace.name: workspace.allocate(cuda) for workspace in recipe.workspaces}
            y = empty_output(problem, cuda)
            y.fill_(77)
            bind(recipe, {**inputs, **spaces, "y": y}, problem.name)()
            torch.cuda.synchronize()
            assert torch.equal(y, expected), (rung.name, config, int((y != expected).sum()))
            seen += 1
    assert seen
    wide = exact(problem, inputs)
    assert float(((expected.double() - wide.clamp(-128, 127)).abs()).max()) <= 0.5 or problem.output


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v2"])
def test_networks_are_as_exact_as_their_codes(
    name: str, dtype: str, cuda: torch.device, tmp_path: pathlib.Path
) -> None:
    """Compared with fp32, and with the same codes computed by PyTorch, where ties may round differently."""
    model, _ = models.model(name)
    torch.manual_seed(1)
    x = torch.randn(32, 3, 224, 224)
    settle(model, x[:8])
    model, x = model.eval().to(cuda), x.to(cuda)
    engine = escalade.compile(model, x, dtype=dtype, calibration=[x[16:]])
    engine.save(tmp_path / "engine")
    with torch.no_grad():
        expected = model(x).double()
    found = engine(x).double()
    codes = escalade.load(tmp_path / "engine", device="cpu")(x[:4].cpu()).to(cuda).double()
    noise = float((found - expected).norm() / expected.norm())
    ties = float((found[:4] - codes).norm() / codes.norm())
    print(f"{name} {dtype}: off by {noise:.4f}, and from its codes by {ties:.4f}")
    assert ties < 1.5 * noise  # one code that rounds differently changes the rounding of all later ones
    assert noise < {"int8": 0.25, "fp8": 0.4}[dtype]
    assert torch.equal(engine(x).double(), found)


def test_uint8_images_are_read_by_the_stem(cuda: torch.device) -> None:
    model, _ = models.model("resnet18")
    model = model.eval().to(cuda)
    images = torch.randint(0, 256, (8, 3, 224, 224), dtype=torch.uint8, device=cuda)
    normalize = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    engine = escalade.compile(model, images, dtype="int8", normalize=normalize, calibration=[images])
    assert not [
        step for step in engine.plan(images).steps if step.node.op in ("quantise", "convert", "normalise")
    ][1:]
    mean, std = (torch.tensor(values, device=cuda).view(3, 1, 1) for values in normalize)
    with torch.no_grad():
        expected = model((images / 255 - mean) / std)
    assert float((engine(images) - expected).norm() / expected.norm()) < 0.1
