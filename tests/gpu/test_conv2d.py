"""The operator on CUDA tensors: PyTorch's requirements of an operator, and sizes that only fit a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade.errors import UnsupportedError
from escalade.ops import Rung, conv2d
from escalade.ops.base.accuracy import relative_error
from escalade.ops.base.dtypes import STORAGE
from escalade.ops.base.switches import precision
from escalade.ops.conv2d import Conv2dProblem
from escalade.ops.shared.images import MEMORY_FORMAT
from escalade.tune.verification import VerificationCase, compare
from tests.gpu.suitable import CONV2D, NOT_BEYOND_32_BITS, beyond_32_bits, problem_for
from tests.support import label, with_batch

pytestmark = pytest.mark.gpu
each_rung = pytest.mark.parametrize("rung", CONV2D.ladder.rungs, ids=label)

OPTIONS: dict[str, Any] = {"padding": 1}
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def tensors(
    device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = 4
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(batch, 64, 28, 28, generator=generator, device=device)
    weight = torch.randn(64, 64, 3, 3, generator=generator, device=device) / 24
    return x.to(dtype), weight.to(dtype)


TOLERANCE = {torch.float32: 6e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""The largest error that a rung states, Winograd's in fp32; in 16 bits two units of roundoff."""


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    failure, _ = compare(result, expected.double(), TOLERANCE[result.dtype])
    assert not failure, failure


def exact(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.conv2d(x.double(), weight.double(), **options)


def call(
    rung: Rung[Conv2dProblem], problem: Conv2dProblem, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    return conv2d(
        x, weight, stride=problem.stride, padding=problem.padding, groups=problem.groups,
        tf32=problem.dtype == "tf32", rung=rung.name,
    )  # fmt: skip


@pytest.mark.parametrize("memory_format", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_and_layouts(
    dtype: torch.dtype, memory_format: torch.memory_format, cuda: torch.device, seed: int
) -> None:
    x, weight = tensors(cuda, dtype, seed)
    y = conv2d(x.contiguous(memory_format=memory_format), weight, **OPTIONS)
    assert y.is_contiguous(memory_format=memory_format)
    assert_close(y, exact(x, weight, **OPTIONS))


@each_rung
def test_a_rung_by_name(rung: Rung[Conv2dProblem], cuda: torch.device, seed: int) -> None:
    problem = problem_for(rung)
    assert problem is not None
    case = VerificationCase(CONV2D, problem, cuda, seed)
    inputs = case.inputs_in(problem.layout)
    y = call(rung, problem, inputs["x"], inputs["weight"])
    assert compare(y, case.expected, rung.tolerance(problem, case.peer_error))[0] == ""


def test_tensors_that_are_not_aligned(cuda: torch.device) -> None:
    x, weight = tensors(cuda, torch.float16)
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    for memory_format in LAYOUTS:
        last = shifted.contiguous(memory_format=memory_format)
        assert_close(conv2d(last, weight, **OPTIONS), exact(x, weight, **OPTIONS))
    torch.cuda.synchronize()


def test_more_than_two_to_the_31_elements(much_memory: Callable[[int], None], cuda: torch.device) -> None:
    """Offsets past 32 bits: the last images, where a wrapped index would access the start."""
    batch = 2**31 // (64 * 224 * 224) + 8
    much_memory(2 * 2 * batch * 64 * 224 * 224)
    weight = torch.randn(64, 64, 3, 3, device=cuda, dtype=torch.float16) / 24
    for memory_format in LAYOUTS:
        x = torch.empty(batch, 64, 224, 224, device=cuda, dtype=torch.float16, memory_format=memory_format)
        for chunk in x.split(32):
            chunk.normal_()
        assert x.numel() > 2**31
        y = conv2d(x, weight, **OPTIONS)
        for part in (slice(0, 2), slice(batch // 2, batch // 2 + 2), slice(batch - 2, batch)):
            assert_close(y[part], exact(x[part], weight, **OPTIONS))
        del x, y


@each_rung
def test_every_rung_beyond_32_bits(
    rung: Rung[Conv2dProblem], much_memory: Callable[[int], None], cuda: torch.device, seed: int
) -> None:
    """One channel plane is small, the batch is not: outputs past 2^31, of which three images are checked."""
    problem = beyond_32_bits(rung)
    if problem is None:
        assert rung.name in NOT_BEYOND_32_BITS, (
            f"{rung.name} is not tried beyond 32 bits, and nothing says why"
        )
        pytest.skip(NOT_BEYOND_32_BITS[rung.name])
    assert problem.output_elements > 2**31
    recipe = rung.recipe(problem, rung.configs(problem)[0])
    much_memory(problem.bytes + sum(workspace.bytes for workspace in recipe.workspaces))
    weight = CONV2D.inputs(with_batch(problem, 1), cuda, seed)["weight"]
    x = torch.empty(
        (problem.batch, problem.channels, problem.height, problem.width),
        dtype=STORAGE[problem.dtype], device=cuda, memory_format=MEMORY_FORMAT[problem.layout],
    )  # fmt: skip
    for chunk in x.split(512):
        chunk.normal_()
    y = call(rung, problem, x, weight)
    for first in (0, problem.batch // 2, problem.batch - 1):
        one = with_batch(problem, 1)
        inputs = {"x": x[first : first + 1], "weight": weight}
        expected = CONV2D.reference(one, inputs)
        allowed = rung.tolerance(one, relative_error(CONV2D.peer(one, inputs), expected))
        assert compare(y[first : first + 1], expected, allowed)[0] == "", f"image {first}"


# --- streams and graphs


def test_the_current_stream_is_used(cuda: torch.device) -> None:
    """On a busy side stream: a launch on any other stream would read x too early."""
    x, weight = tensors(cuda)
    expected = exact(x, weight, **OPTIONS)
    conv2d(x, weight, **OPTIONS)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        late.copy_(x)
        y = conv2d(late, weight, **OPTIONS)
    side.synchronize()
    assert_close(y, expected)


@each_rung
def test_two_streams_do_not_share_a_workspace(
    rung: Rung[Conv2dProblem], cuda: torch.device, seed: int
) -> None:
    problem = problem_for(rung, batch=64)
    assert problem is not None
    cases = [VerificationCase(CONV2D, problem, cuda, seed + turn) for turn in range(6)]
    given = [case.inputs_in(problem.layout) for case in cases]
    call(rung, problem, given[0]["x"], given[0]["weight"])  # compiled
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for turn, inputs in enumerate(given):
        with torch.cuda.stream(streams[turn % 2]):
            results.append(call(rung, problem, inputs["x"], inputs["weight"]))
    torch.cuda.synchronize()
    for turn, (case, y) in enumerate(zip(cases, results, strict=True)):
        assert compare(y, case.expected, rung.tolerance(problem, case.peer_error))[0] == "", f"call {turn}"


@pytest.mark.parametrize("memory_format", LAYOUTS)
def test_cuda_graph(memory_format: torch.memory_format, cuda: torch.device) -> None:
    x, weight = tensors(cuda)
    x = x.contiguous(memory_format=memory_format)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles and loads: neither may happen during graph capture
        conv2d(x, weight, relu=True, **OPTIONS)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = conv2d(x, weight, relu=True, **OPTIONS)
    for seed in (1, 2):
        x.copy_(tensors(cuda, seed=seed)[0])
        y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_close(y, exact(x, weight, **OPTIONS).relu())


# --- PyTorch's features


def test_opcheck(cuda: torch.device) -> None:
    x, weight = tensors(cuda, batch=1)
    last = x.contiguous(memory_format=torch.channels_last)
    bias, residual = torch.randn(64, device=cuda), torch.randn(1, 64, 28, 28, device=cuda)
    for arguments in (
        (x, weight, None, None, [1, 1], [1, 1]),
        (last, weight, bias, residual, [1, 1], [1, 1], [1, 1], 1, True),
        (x.clone().requires_grad_(), weight.clone().requires_grad_(), None, None, [1, 1], [1, 1]),
    ):
        torch.library.opcheck(torch.ops.escalade.conv2d.default, arguments)


def test_gradients(cuda: torch.device) -> None:
    x, weight = (tensor.requires_grad_() for tensor in tensors(cuda))
    bias = torch.randn(64, device=cuda, requires_grad=True)
    given = (x, weight, bias)
    with precision("fp32"):
        mine = torch.autograd.grad(conv2d(*given, relu=True, **OPTIONS).square().sum(), given)
        its = torch.autograd.grad(F.conv2d(*given, **OPTIONS).relu().square().sum(), given)
    for first, second in zip(mine, its, strict=True):
        assert float((first - second).norm() / second.norm()) < 1e-4


def test_autocast(cuda: torch.device) -> None:
    x, weight = tensors(cuda)
    with torch.autocast("cuda", dtype=torch.float16):
        y = conv2d(x, weight, torch.ones(64, device=cuda), tf32=True, **OPTIONS)
    assert y.dtype == torch.float16
    assert_close(y, exact(x, weight, **OPTIONS) + 1)


def test_torch_compile(cuda: torch.device) -> None:
    x, weight = tensors(cuda)
    compiled = torch.compile(
        lambda x: conv2d(x * 2, weight, **OPTIONS).sin(), fullgraph=True, backend="aot_eager"
    )
    assert_close(compiled(x), exact(x * 2, weight, **OPTIONS).sin())


def test_threads(cuda: torch.device) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(20):
                    x, weight = tensors(cuda, seed=100 * number + turn)
                    assert_close(conv2d(x, weight, **OPTIONS), exact(x, weight, **OPTIONS))
        except Exception as error:
            wrong.append(f"thread {number}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_cpu_and_cuda_do_not_mix(cuda: torch.device) -> None:
    x, weight = tensors(cuda)
    with pytest.raises(UnsupportedError, match=r"weight is .* on cpu; conv2d takes .* on one"):
        conv2d(x, weight.cpu())


def test_the_host_cost_of_the_operator(cuda: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, not asserted: it depends on the machine."""
    x, weight = tensors(cuda, batch=1)
    costs = {}
    for name, function in (("escalade", conv2d), ("torch", F.conv2d)):
        for _ in range(100):
            function(x, weight, padding=1)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(500):
            function(x, weight, padding=1)
        costs[name] = (time.perf_counter() - began) * 2000
        torch.cuda.synchronize()
    with capsys.disabled():
        print("\nhost cost of conv2d, us:", ", ".join(f"{name} {cost:.1f}" for name, cost in costs.items()))
