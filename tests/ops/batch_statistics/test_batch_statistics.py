"""Mean and variance of a batch: robust, reproducible, differentiable."""

from __future__ import annotations

import pytest
import torch

from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, Rung, batch_statistics
from escalade.ops.batch_statistics import BatchStatisticsProblem, SplitConfig

CPU = torch.device("cpu")
OPERATION = OPERATIONS["batch_statistics"]
each_rung = pytest.mark.parametrize("rung", OPERATION.ladder.rungs, ids=lambda rung: rung.name)
each_layout = pytest.mark.parametrize("layout", ["nchw", "nhwc"])


def exact(x: torch.Tensor) -> torch.Tensor:
    variance, mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    return torch.stack((mean, variance))


@each_rung
@each_layout
def test_a_mean_of_a_thousand_deviations(rung: Rung[BatchStatisticsProblem], layout: str, seed: int) -> None:
    """In fp32 the difference of E[x²] and E[x]² would have no correct digit: at 1e6 the spacing is 0.06."""
    problem = BatchStatisticsProblem(2, 8, 40, 40, layout=layout)
    x = OPERATION.inputs(problem, CPU, seed)["x"] + 1000
    y = OPERATION.output(problem, CPU)
    bind(rung.recipe(problem, rung.configs(problem)[0]), {"x": x, "y": y})()
    torch.testing.assert_close(y[0], exact(x)[0].float(), rtol=5e-7, atol=0)
    torch.testing.assert_close(y[1], exact(x)[1].float(), rtol=2e-5, atol=0)


@each_layout
def test_every_order_gives_the_same_bits(layout: str, seed: int) -> None:
    """Shuffled threads and CTAs: results do not depend on the order."""
    problem = BatchStatisticsProblem(3, 16, 30, 20, dtype="fp16", layout=layout)
    recipe = OPERATION.ladder.rung("split").recipe(problem, SplitConfig(128, 2, 64))
    assert recipe.steps[0].grid[0] > 4, "several splits"  # type: ignore[union-attr]
    x = OPERATION.inputs(problem, CPU, seed)["x"]
    results = []
    for order in (0, seed, seed + 1):
        y = OPERATION.output(problem, CPU)
        bind(recipe, {"x": x, "y": y}, options=TwinOptions(order=Order(seed=order)))()
        results.append(y)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.share(7)
@each_layout
@pytest.mark.parametrize("channels", [1, 5, 8, 72])
@pytest.mark.parametrize("config", [SplitConfig(128, 4, 48), SplitConfig(64, 1, 4096)], ids=str)
def test_splits_of_any_size(layout: str, channels: int, config: SplitConfig, seed: int) -> None:
    """Short last splits, CTAs with idle threads; every access is checked."""
    problem = BatchStatisticsProblem(3, channels, 13, 7, dtype="bf16", layout=layout)
    x = OPERATION.inputs(problem, CPU, seed)["x"]
    y = OPERATION.output(problem, CPU).fill_(float("nan"))
    recipe = OPERATION.ladder.rung("split").recipe(problem, config)
    bind(recipe, {"x": x, "y": y}, options=TwinOptions(order=Order(seed=seed), checks=True))()
    torch.testing.assert_close(y, exact(x).float(), rtol=1e-6, atol=1e-6)


def test_a_constant_channel_has_no_variance() -> None:
    y = batch_statistics(torch.full((4, 3, 5, 5), 0.1))
    torch.testing.assert_close(y[0], torch.full((3,), 0.1), rtol=1e-6, atol=0)
    assert y[1].abs().max() < 1e-12


@each_rung
@each_layout
def test_numbers_near_the_largest(rung: Rung[BatchStatisticsProblem], layout: str) -> None:
    """Their squares overflow fp32: unread slots must add 0 to the mean, not 0 times infinity."""
    problem = BatchStatisticsProblem(2, 8, 10, 10, layout=layout)
    x = torch.full((2, 8, 10, 10), 1e30).contiguous(
        memory_format=torch.channels_last if layout == "nhwc" else torch.contiguous_format
    )
    y = OPERATION.output(problem, CPU)
    bind(rung.recipe(problem, rung.configs(problem)[0]), {"x": x, "y": y})()
    torch.testing.assert_close(y[0], torch.full((8,), 1e30), rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@each_rung
def test_what_is_not_finite_stays_in_its_channel(rung: Rung[BatchStatisticsProblem], value: float) -> None:
    for layout in ("nchw", "nhwc"):
        problem = BatchStatisticsProblem(2, 8, 9, 9, layout=layout)
        x = OPERATION.inputs(problem, CPU, 0)["x"]
        x[1, 3, 4, 4] = value
        y = OPERATION.output(problem, CPU)
        bind(rung.recipe(problem, rung.configs(problem)[0]), {"x": x, "y": y})()
        assert not y[:, 3].isfinite().any()
        assert y[:, :3].isfinite().all() and y[:, 4:].isfinite().all()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradients_are_those_of_pytorch(memory_format: torch.memory_format, seed: int) -> None:
    x = torch.randn(2, 5, 4, 3, generator=torch.Generator().manual_seed(seed))
    mine = x.clone(memory_format=memory_format).requires_grad_()
    its = x.double().requires_grad_()
    gradient = torch.randn(2, 5)
    batch_statistics(mine).backward(gradient)
    exact(its).backward(gradient.double())
    assert mine.grad is not None and its.grad is not None
    torch.testing.assert_close(mine.grad, its.grad.float(), rtol=1e-5, atol=1e-6)


def test_tensors_of_any_strides(seed: int) -> None:
    x = torch.randn(2, 6, 8, 10, generator=torch.Generator().manual_seed(seed))
    for strided in (x.transpose(2, 3), x[..., ::2], x[:, 1:], x[:1].expand(3, -1, -1, -1)):
        torch.testing.assert_close(batch_statistics(strided), exact(strided).float(), rtol=1e-6, atol=1e-6)


def test_what_it_refuses() -> None:
    with pytest.raises(UnsupportedError, match=r"batch_statistics takes x: N C H W"):
        batch_statistics(torch.ones(2, 3, 4))
    with pytest.raises(UnsupportedError, match=r"\(float32, float16 or bfloat16\)"):
        batch_statistics(torch.ones(2, 3, 4, 4).int())
    with pytest.raises(UnsupportedError, match="batch is 0"):
        batch_statistics(torch.ones(0, 3, 4, 4))
    with pytest.raises(UnsupportedError, match="no rung 'nonsense'"):
        batch_statistics(torch.ones(1, 3, 4, 4), rung="nonsense")
    with pytest.raises(UnsupportedError, match="does not name a statistics"):
        BatchStatisticsProblem.parse("64_56_b32_relu")


def test_opcheck() -> None:
    x = torch.randn(2, 4, 3, 3)
    torch.library.opcheck(torch.ops.escalade.batch_statistics.default, (x,))
    torch.library.opcheck(torch.ops.escalade.batch_statistics.default, (x.requires_grad_(),))
