"""Memory-bound kernels on tensors of many tiles per persistent CTA, and of CTAs that wait for each other."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from escalade.device.run import bind
from escalade.ops import OPERATIONS
from escalade.ops.base.card import Card
from tests.support import check

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
LARGE = {
    "softmax": ("64_b4_inner65536", "37_b5_inner7161", "300_b2_inner4096_log"),
    "layer_norm": ("64_b4_inner65536_weight_bias", "11_b8_inner50177", "1000_b2_inner2048_rms"),
    "group_norm": (
        "64_256_b4_g8_weight_bias", "64_256_b2_g64_relu", "37_77x93_b5_g1_weight_bias", "128_128_b8_g128_weight_bias",
        "24_90_b64_g24",
    ),
    "upsample2d": ("64_200to400_b4_bicubic", "5_311x97to640x333_b3_bicubic", "64_256to512_b4_nearest"),
    "pad2d": ("64_250_pad2x2x2x2_b4_reflect", "3_700x1300_pad1x0x2x3_b2_constant(1.5)"),
    "pixel_shuffle": ("256_128_up2_b3", "27_333x77_up3_b2", "16_250_down2_b3"),
}  # fmt: skip


@pytest.mark.parametrize("operation", LARGE)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_every_config_is_right_on_large_problems(operation: str, dtype: str, seed: int) -> None:
    asked = OPERATIONS[operation]
    for name, rung in product(LARGE[operation], asked.ladder.on(Card.of(CUDA))):
        for layout in asked.layouts:
            problem = (
                asked.problem.parse(name, dtype, layout)
                if layout != "flat"
                else asked.problem.parse(name, dtype)
            )
            if rung.name == "naive" or layout == "nhwc" or rung.supports(problem):
                continue
            for config in rung.configs(problem):
                check(asked, rung, problem, config, CUDA, seed)


def test_streamed_rows_in_many_calls_and_streams() -> None:
    """A CTA that waits for one that has not started would hang; a counter that is not reset would corrupt the next
    launch."""
    asked = OPERATIONS["group_norm"]
    problem = asked.problem.parse("32_256_b8_g8", "fp32", "nchw")
    rung = asked.ladder.on(Card.of(CUDA)).rung("streamed")
    x = torch.randn(8, 32, 256, 256, device=CUDA)
    expected = F.group_norm(x.double(), 8).float()
    recipe = rung.recipe(problem, rung.configs(problem)[0])
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = [torch.empty_like(x) for _ in streams]
    calls = [bind(recipe, {"x": x, "y": y}) for y in results]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                call()
    torch.cuda.synchronize()
    for y in results:
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(y, results[0])
