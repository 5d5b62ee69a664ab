"""Batch normalization: against PyTorch in inference and training, NaN, in place, gradients, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from escalade.device.program import Type
from escalade.device.recipe import KernelCall
from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, batch_norm
from escalade.ops.batch_norm import BatchNormProblem, PacksConfig
from tests import formulas

CPU = torch.device("cpu")
WIDE = Type("unsigned long long")
FORMATS = [torch.contiguous_format, torch.channels_last]


def tensors(
    seed: int, channels: int = 8, size: int = 6, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, dict[str, Any]]:
    """x, and weight, bias and the running statistics."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(3, channels, size, size, generator=generator) * 2 + 1).to(dtype)
    names = ("weight", "bias", "running_mean")
    parameters = {name: torch.randn(channels, generator=generator) for name in names}
    parameters["running_var"] = torch.rand(channels, generator=generator) + 0.5
    return x, parameters


def torch_batch_norm(
    x: torch.Tensor, parameters: dict[str, Any], relu: bool = False, residual: Any = None, **options: Any
) -> torch.Tensor:
    p = parameters
    if options.get("eps") == 0:  # F.batch_norm of PyTorch 2.11 refuses it
        y = torch.batch_norm(
            x, p["weight"], p["bias"], p["running_mean"], p["running_var"], False, 0.1, 0.0, False
        )
    else:
        y = F.batch_norm(x, p["running_mean"], p["running_var"], p["weight"], p["bias"], **options)
    y = y if residual is None else y + residual
    return F.relu(y) if relu else y


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[result.dtype]
    torch.testing.assert_close(
        result, expected.to(result.dtype), rtol=tolerance, atol=2 * tolerance, equal_nan=True
    )


# --- inference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("memory_format", FORMATS)
def test_inference(dtype: torch.dtype, memory_format: torch.memory_format, seed: int) -> None:
    x, parameters = tensors(seed, dtype=dtype)
    residual = torch.randn(x.shape).to(dtype)
    x = x.contiguous(memory_format=memory_format)
    y = batch_norm(x, **parameters, relu=True, residual=residual)
    assert y.dtype == dtype and y.is_contiguous(memory_format=memory_format)
    assert_close(y, torch_batch_norm(x.float(), parameters, relu=True, residual=residual.float()))


@pytest.mark.parametrize("absent", ["weight", "bias", "both"])
def test_weight_and_bias_are_optional(absent: str, seed: int) -> None:
    x, parameters = tensors(seed)
    some: dict[str, Any] = {
        name: None if name == absent or (absent == "both" and name in ("weight", "bias")) else tensor
        for name, tensor in parameters.items()
    }
    for eps in (1e-3, 0.0):
        assert_close(batch_norm(x, **some, eps=eps), torch_batch_norm(x, some, eps=eps))


def test_half_parameters_of_a_half_network(seed: int) -> None:
    x, parameters = tensors(seed, dtype=torch.bfloat16)
    half = {name: tensor.bfloat16() for name, tensor in parameters.items()}
    wanted = torch_batch_norm(x.float(), {name: tensor.float() for name, tensor in half.items()})
    assert_close(batch_norm(x, **half), wanted)


@given(
    batch=st.integers(0, 3),
    channels=st.integers(1, 20),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    channels_last=st.booleans(),
    half=st.booleans(),
)
@settings(max_examples=25)
def test_any_shape(
    batch: int, channels: int, height: int, width: int, channels_last: bool, half: bool
) -> None:
    _, parameters = tensors(batch + channels, channels)
    x = torch.randn(batch, channels, height, width)
    x = x.contiguous(memory_format=FORMATS[channels_last]).to(torch.float16 if half else torch.float32)
    assert_close(batch_norm(x, **parameters), torch_batch_norm(x.float(), parameters))


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("where", ["x", "running_mean", "running_var", "weight", "residual"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_travel(where: str, value: float, memory_format: torch.memory_format) -> None:
    x, parameters = tensors(3)
    given: dict[str, Any] = {"x": x, "residual": torch.randn(x.shape), **parameters}
    given[where].view(-1)[3] = value
    x, residual = given.pop("x").contiguous(memory_format=memory_format), given.pop("residual")
    y = batch_norm(x, **given, relu=True, residual=residual)
    each = {name: tensor.double().view(1, -1, 1, 1) for name, tensor in given.items()}
    scale = (
        each["weight"] / (each["running_var"] + 1e-5).sqrt()
    )  # 0 for an infinite variance, NaN for a negative one
    assert_close(y, formulas.relu((x - each["running_mean"]) * scale + each["bias"] + residual))


def test_a_mean_far_from_zero_costs_no_digits(seed: int) -> None:
    x, parameters = tensors(seed)
    x += 10_000
    parameters["running_mean"] += 10_000
    exact = torch_batch_norm(x.double(), {name: tensor.double() for name, tensor in parameters.items()})
    assert_close(batch_norm(x, **parameters), exact)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("rung", ["naive", "scaled", "vectorised"])
@pytest.mark.parametrize("over", ["x", "residual"])
def test_recipes_run_in_place(rung: str, layout: str, over: str, seed: int) -> None:
    """y is x or the residual, with threads and CTAs in any order."""
    operation = OPERATIONS["batch_norm"]
    problem = BatchNormProblem(3, 16, 7, 7, relu=True, residual=True, dtype="fp16", layout=layout)
    inputs = operation.inputs(problem, CPU, seed)
    exact = operation.reference(problem, inputs)
    one = operation.ladder.rung(rung)
    options = TwinOptions(order=Order(seed=seed))
    bind(one.recipe(problem, one.configs(problem)[0]), {**inputs, "y": inputs[over]}, options=options)()
    assert_close(inputs[over], exact)


@pytest.mark.parametrize("problem", [
    BatchNormProblem(2, 24, 9, 9, relu=True, residual=True, dtype="fp16", layout="nhwc"),
    BatchNormProblem(2, 24, 9, 9, relu=True, residual=True, dtype="fp16", layout="nchw"),
    BatchNormProblem(1, 2056, 3, 3, relu=True, residual=True, dtype="fp16", layout="nhwc"),
])  # fmt: skip
@pytest.mark.parametrize("config", [PacksConfig(128, 4, 1), PacksConfig(128, 4, 3)], ids=str)
def test_several_packs_and_turns_a_thread(problem: BatchNormProblem, config: PacksConfig, seed: int) -> None:
    """Rows and elements that no config's steps divide."""
    operation = OPERATIONS["batch_norm"]
    inputs = operation.inputs(problem, CPU, seed)
    y = operation.output(problem, CPU).fill_(float("nan"))
    options = TwinOptions(checks=True)
    bind(operation.ladder.rung("vectorised").recipe(problem, config), {**inputs, "y": y}, options=options)()
    assert_close(y, operation.reference(problem, inputs))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_sizes_beyond_32_bits_are_counted_in_64(layout: str) -> None:
    problem = BatchNormProblem(2**17, 64, 56, 56, dtype="fp16", layout=layout)
    for rung in OPERATIONS["batch_norm"].ladder:
        for call in rung.recipe(problem, rung.configs(problem)[0]).steps:
            assert isinstance(call, KernelCall)
            assert call.grid[0] < 2**31 and call.grid[1] < 2**16
            assert dict(call.program.constants).get("Index", WIDE) == WIDE


def test_images_beyond_32_bits_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"fewer than 2\^31"):
        BatchNormProblem(1, 2**16, 2**8, 2**8)


# --- training


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("memory_format", FORMATS)
def test_training(dtype: torch.dtype, memory_format: torch.memory_format, seed: int) -> None:
    x, parameters = tensors(seed, dtype=dtype)
    x = x.contiguous(memory_format=memory_format)
    its = {name: tensor.clone() for name, tensor in parameters.items()}
    for _ in range(3):
        y = batch_norm(x, **parameters, training=True, momentum=0.3)
        wanted = torch_batch_norm(x.float(), its, training=True, momentum=0.3)
        assert_close(y, wanted)
        x = (x.float() * 1.5 - 1).to(dtype)
    for name, tensor in parameters.items():
        assert_close(tensor, its[name])


def test_training_without_running_statistics(seed: int) -> None:
    x, parameters = tensors(seed)
    some: dict[str, Any] = {**parameters, "running_mean": None, "running_var": None}
    assert_close(batch_norm(x, **some, training=True), torch_batch_norm(x, some, training=True))


def test_training_is_the_same_to_the_bit_every_time(seed: int) -> None:
    x, parameters = tensors(seed, channels=16, size=40)
    x = x.contiguous(memory_format=torch.channels_last)
    first, second = (batch_norm(x, **parameters, training=True, momentum=0.0) for _ in range(2))
    assert torch.equal(first, second)


# --- gradients


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_gradients_are_those_of_pytorch(
    training: bool, relu: bool, memory_format: torch.memory_format, seed: int
) -> None:
    x, parameters = tensors(seed)
    residual = torch.randn(x.shape)

    def leaves() -> tuple[list[torch.Tensor], dict[str, Any]]:
        images = [x.clone(memory_format=memory_format).requires_grad_(), residual.clone().requires_grad_()]
        own = {
            name: tensor.clone().requires_grad_(name in ("weight", "bias"))
            for name, tensor in parameters.items()
        }
        return images, own

    (my_x, my_residual), mine = leaves()
    (its_x, its_residual), its = leaves()
    gradient = torch.randn(x.shape)
    batch_norm(my_x, **mine, training=training, relu=relu, residual=my_residual).backward(gradient)
    torch_batch_norm(its_x, its, relu, its_residual, training=training).backward(gradient)
    pairs = [(my_x, its_x), (my_residual, its_residual), *((mine[n], its[n]) for n in ("weight", "bias"))]
    for one, other in pairs:
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_only_the_gradients_that_are_asked_for(seed: int) -> None:
    x, parameters = tensors(seed)
    parameters["bias"].requires_grad_()
    batch_norm(x, **parameters, training=True).sum().backward()
    assert x.grad is None and parameters["weight"].grad is None
    assert parameters["bias"].grad is not None


# --- refusals


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": torch.ones(3, 8)}, r"x is torch.float32 \[3, 8\]"),
        ({"x": torch.ones(3, 8, 2, 2).double()}, r"x is torch.float64 .*\(float32, float16 or bfloat16\)"),
        ({"weight": torch.ones(7)}, r"weight is torch.float32 \[7\].* here C is 8"),
        ({"running_mean": torch.ones(8, 1)}, r"mean is torch.float32 \[8, 1\]"),
        (
            {"running_var": torch.ones(8).double()},
            r"variance is torch.float64 .*variance: C of float32\|x",
        ),
        ({"bias": torch.ones(8, device="meta")}, "bias is .* on meta"),
        ({"residual": torch.ones(3, 8, 6, 5)}, r"residual is torch.float32 \[3, 8, 6, 5\].* here N is 3"),
        ({"residual": torch.ones(3, 8, 6, 6).half()}, "residual is torch.float16"),
        ({"running_mean": None}, "batch_norm without training needs running_mean and running_var"),
        ({"eps": -0.5}, "it must be finite and at least"),
        ({"eps": float("nan")}, "it must be finite and at least"),
        ({"rung": "nonsense"}, "no rung 'nonsense'; it has naive"),
        ({"x": torch.ones(0, 8, 6, 6), "rung": "nonsense"}, "no rung 'nonsense'"),
        ({"x": torch.ones(1, 8, 1, 1), "training": True}, "training needs more than one value per"),
        ({"x": torch.ones(0, 8, 6, 6), "training": True}, "training needs more than one value per"),
    ],
)
def test_what_it_refuses(change: dict[str, Any], sentence: str) -> None:
    x, parameters = tensors(0)
    with pytest.raises(UnsupportedError, match=sentence):
        batch_norm(**{"x": x, **parameters, **change})


def test_small_planes_are_left_to_the_rung_below(seed: int) -> None:
    x, parameters = tensors(seed, size=2, dtype=torch.float16)
    with pytest.raises(UnsupportedError, match="use the rung `scaled`"):
        batch_norm(x, **parameters, rung="vectorised")
    assert_close(batch_norm(x, **parameters), torch_batch_norm(x.float(), parameters))


def test_names() -> None:
    problem = BatchNormProblem(32, 64, 56, 48, relu=True, residual=True, epsilon=1e-3)
    assert problem.name == "64_56x48_b32_eps0.001_res+relu"
    for epsilon in (0.0, 1e-5, 1e-3, 2.5e-7, 1.0):
        problem = BatchNormProblem(1, 2, 3, 3, epsilon=epsilon)
        assert BatchNormProblem.parse(problem.name) == problem
    with pytest.raises(UnsupportedError, match="does not name a batch normalization"):
        BatchNormProblem.parse("64_56")


# --- PyTorch's features


@pytest.mark.parametrize("training", [False, True])
def test_opcheck(training: bool) -> None:
    x, p = tensors(0)
    x.requires_grad_()
    residual = torch.randn(x.shape)
    if training:
        running = p["running_mean"], p["running_var"]
        arguments: tuple[Any, ...] = (x, p["weight"], None, *running, 0.1, 1e-3, True, residual)
        torch.library.opcheck(torch.ops.escalade.batch_norm_training.default, arguments)
    else:
        arguments = (x, p["weight"], None, p["running_mean"], p["running_var"], 1e-3, True, residual)
        torch.library.opcheck(torch.ops.escalade.batch_norm_inference.default, arguments)


class Block(torch.nn.Module):
    def __init__(self, ours: bool) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(8)
        self.ours = ours

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        given = (norm.weight, norm.bias, norm.running_mean, norm.running_var, self.training)
        if self.ours:
            return batch_norm(x * 2, *given, relu=True).sin()
        return F.relu(F.batch_norm(x * 2, given[2], given[3], given[0], given[1], self.training)).sin()


@pytest.mark.parametrize("training", [False, True])
def test_torch_compile_takes_it_whole(training: bool, seed: int) -> None:
    torch._dynamo.reset()
    x, _ = tensors(seed)
    mine, its = Block(True).train(training), Block(False).train(training)
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    compiled(x).sum().backward()
    its(x).sum().backward()
    for name, parameter in its.norm.named_parameters():
        torch.testing.assert_close(mine.norm.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-4)
    for name in ("running_mean", "running_var"):
        assert_close(mine.norm.get_buffer(name), its.norm.get_buffer(name))


def test_torch_export() -> None:
    exported = torch.export.export(Block(True).eval(), (tensors(0)[0],))
    x, _ = tensors(1)
    assert_close(exported.module()(x), Block(False).eval()(x))
