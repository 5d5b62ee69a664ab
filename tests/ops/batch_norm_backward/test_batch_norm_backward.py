"""The gradients of batch normalization: the same bits in any order, in place, twice, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, batch_norm, batch_norm_backward
from escalade.ops.batch_norm_backward import BatchNormBackwardProblem, SharedConfig

CPU = torch.device("cpu")
OPERATION = OPERATIONS["batch_norm_backward"]


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_every_order_gives_the_same_bits_and_x_may_be_written_over(layout: str, seed: int) -> None:
    """CTAs that share sums, truncated steps, and shuffled threads: results do not depend on the order."""
    problem = BatchNormBackwardProblem(3, 24, 11, 8, "output", residual=True, dtype="fp16", layout=layout)
    recipe = OPERATION.ladder.rung("vectorised").recipe(problem, SharedConfig(64, 3, 1))
    inputs = OPERATION.inputs(problem, CPU, seed)
    results = []
    for order, over in ((0, None), (seed, "x"), (seed + 1, "gradient")):
        given = {name: tensor.clone() for name, tensor in inputs.items()}
        y = given[over] if over else OPERATION.output(problem, CPU)
        outputs = {"y": y, **OPERATION.extra_outputs(problem, CPU)}
        bind(recipe, {**given, **outputs}, options=TwinOptions(order=Order(seed=order)))()
        results.append(outputs)
    for name, first in results[0].items():
        assert all(torch.equal(first, other[name]) for other in results[1:]), name


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_gradients_of_gradients(relu: bool, residual: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 4, 3, 3, generator=generator) * 2 + 1
    weight, bias, more = (torch.rand(size, generator=generator) + 0.5 for size in ((4,), (4,), (2, 4, 3, 3)))

    def gradients(normalise: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [one.to(dtype, copy=True).requires_grad_() for one in (x, weight, bias, more)]
        y = normalise(*leaves)
        once = torch.autograd.grad(y.square().sum(), leaves, create_graph=True, allow_unused=not residual)
        total = torch.stack([one.square().sum() for one in once if one is not None]).sum()
        twice = torch.autograd.grad(total, leaves[:2])
        return [one for one in (*once, *twice) if one is not None]

    def ours(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return batch_norm(x, w, b, None, None, training=True, relu=relu, residual=r if residual else None)

    def theirs(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        y = F.batch_norm(x, None, None, w, b, training=True)
        y = y + r if residual else y
        return y.relu() if relu else y

    pairs = zip(gradients(ours, torch.float32), gradients(theirs, torch.float64), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


def test_the_mask_is_that_of_the_stored_output() -> None:
    """Values that underflow fp16 are stored as 0 and pass no gradient; a NaN passes."""
    weight, bias, mean, rstd = torch.ones(8), torch.zeros(8), torch.zeros(8), torch.ones(8)
    rstd[:4] = 2.0**-12
    x = torch.full((1, 8, 2, 2), 2.0**-14, dtype=torch.float16)
    x[0, 7] = float("nan")
    _, _, of_bias = batch_norm_backward(
        torch.ones_like(x), x, weight=weight, bias=bias, mean=mean, rstd=rstd, relu=True
    )
    assert of_bias.tolist() == [0.0] * 4 + [4.0] * 4


def given(**changed: Any) -> dict[str, Any]:
    x, each = torch.ones(2, 8, 3, 3), torch.ones(8)
    return {"gradient": x, "x": x, "weight": each, "bias": each, "mean": each, "rstd": each, **changed}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": torch.ones(3, 8)}, r"x is torch.float32 \[3, 8\]"),
        ({"gradient": torch.ones(2, 8, 3, 4)}, r"x is torch.float32 .* here N is 2"),
        ({"output": torch.ones(2, 8, 3, 3).half()}, "output is torch.float16"),
        ({"mean": torch.ones(7)}, r"mean is torch.float32 \[7\].* here C is 8"),
        ({"rstd": torch.ones(8).double()}, r"rstd is torch.float64 .*rstd: C of float32\|x"),
        ({"residual": True}, "behind a ReLU batch_norm_backward needs `output`"),
        ({"rung": "nonsense"}, "no rung 'nonsense'"),
    ],
)
def test_what_it_refuses(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        batch_norm_backward(**given(**change))


def test_problems_have_names_and_limits() -> None:
    for problem in OPERATION.small_problems:
        assert OPERATION.parse(problem.name) == problem
    with pytest.raises(UnsupportedError, match="does not name a gradients of batch normalization"):
        OPERATION.parse("64_56_b32_relu")
    with pytest.raises(UnsupportedError, match=r"pass the output of the ReLU \(mask"):
        BatchNormBackwardProblem(2, 8, 3, 3, "x", residual=True)
    for recompute in ("x * y", "gradient", "x, x"):
        with pytest.raises(UnsupportedError, match="it must be one expression in x, such as relu"):
            BatchNormBackwardProblem(1, 4, 2, 2, recompute=recompute)
    with pytest.raises(UnsupportedError, match="mask 'y': batch_norm_backward supports none, x, output"):
        BatchNormBackwardProblem(2, 8, 3, 3, "y")
    small = BatchNormBackwardProblem(2, 8, 3, 2, dtype="fp16")
    assert "use the rung `split`" in (OPERATION.ladder.rung("vectorised").supports(small) or "")


def test_opcheck() -> None:
    x = torch.randn(2, 8, 3, 3).contiguous(memory_format=torch.channels_last).requires_grad_()
    each = torch.rand(8) + 0.5
    arguments = (
        torch.randn(2, 8, 3, 3),
        x,
        each,
        None,
        each,
        each,
        True,
        torch.randn(2, 8, 3, 3).relu(),
        True,
    )
    torch.library.opcheck(torch.ops.escalade.batch_norm_backward.default, arguments)
