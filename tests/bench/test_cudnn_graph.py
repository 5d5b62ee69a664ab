"""cuDNN's graphs as a peer: the nodes created, the plans built, and the plan chosen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from escalade import ops
from escalade.errors import LaunchError, UnsupportedError
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade_bench.peers import cudnn_graph
from escalade_bench.peers.layer import AGREEMENT


class Names:
    """Fake enumeration: every member is its own name."""

    def __getattr__(self, name: str) -> str:
        return name


class FakeTensor:
    def __init__(self, dim: list[int], stride: list[int], data_type: str) -> None:
        self.dim, self.stride, self.data_type = dim, stride, data_type
        self.alignment, self.output = 16, False

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def setter(value: Any) -> FakeTensor:
            setattr(self, name.removeprefix("set_"), value)
            return self

        return setter


class FakeGraph:
    """Record the graph's nodes; its plans are those of `FakePackage`."""

    def __init__(self, package: FakePackage, **types: Any) -> None:
        self._package = package
        self.types = types
        self.nodes: list[str] = []
        self.geometry: dict[str, list[int]] = {}
        self.barred: list[str] = []
        self.executed: list[tuple[dict[FakeTensor, int], int]] = []

    def tensor(self, dim: list[int], stride: list[int], data_type: str) -> FakeTensor:
        return FakeTensor(dim, stride, data_type)

    def _node(self, name: str, **given: Any) -> FakeTensor:
        self.nodes.append(name)
        self.geometry |= {key: value for key, value in given.items() if isinstance(value, list)}
        return FakeTensor([], [], "")

    def __getattr__(self, name: str) -> Any:
        if name not in "conv_fprop conv_dgrad conv_wgrad bias add mul relu relu_backward".split():
            raise AttributeError(name)
        return lambda **given: self._node(name, **given)

    def validate(self) -> None:
        if self._package.refuses:
            raise RuntimeError("no engine")

    def build_operation_graph(self) -> None: ...

    def create_execution_plans(self, modes: list[str]) -> None:
        assert "A" in modes and "FALLBACK" in modes

    def deselect_numeric_notes(self, notes: list[str]) -> None:
        self.barred = notes

    def get_execution_plan_count(self) -> int:
        return len(self._package.plans)

    def get_plan_name_at_index(self, index: int) -> str:
        return self._package.plans[index][0]

    def build_plan_at_index(self, index: int) -> None:
        if self._package.plans[index][1] < 0:
            raise ValueError("this plan cannot be built")

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return self._package.plans[index][1]

    def execute_plan_at_index(
        self, data: dict[FakeTensor, int], workspace: int, index: int, handle: object
    ) -> None:
        if self._package.fails:
            raise KeyError("at run time")
        self.executed.append((data, index))


class FakePackage:
    """Fake `cudnn`: plans by name and workspace size; one with a negative size cannot be built."""

    def __init__(self) -> None:
        self.plans = [("eng1", 0), ("eng2", -1), ("eng1", 0), ("eng3", 1 << 40), ("eng4", 64)]
        self.refuses = self.fails = False
        self.data_type = self.heur_mode = self.numerical_note = Names()

    def pygraph(self, **types: Any) -> FakeGraph:
        return FakeGraph(self, **types)

    def set_stream(self, handle: object, stream: int) -> None: ...


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> FakePackage:
    fake = FakePackage()
    monkeypatch.setattr(cudnn_graph, "frontend", lambda: fake)
    return fake


def drawn(name: str, dtype: str = "fp16", operation: str = "conv2d") -> list[cudnn_graph.Drawing]:
    problem: Any = Conv2dProblem.parse(name, dtype, "nhwc")
    if operation != "conv2d":
        problem = SimpleNamespace(forward=problem, layout="nhwc", dtype=dtype, mask=name.startswith("8"))
    return list(cudnn_graph.drawings(SimpleNamespace(name=operation), problem, {}))  # type: ignore[arg-type]


def buffers(drawing: cudnn_graph.Drawing) -> list[str]:
    return [buffer for _, buffer, _ in drawing.feeds]


def test_a_residual_and_a_bias_are_drawn_in_both_orders(package: FakePackage) -> None:
    first, second = drawn("64to32_9x8_k3s2d2_b5_bias+res+relu")
    assert first.graph.nodes == ["conv_fprop", "add", "bias", "relu"]
    assert second.graph.nodes == ["conv_fprop", "bias", "add", "relu"]
    assert buffers(first) == ["x", "weight", "residual", "bias"]
    assert first.graph.geometry == {"padding": [1, 1], "stride": [2, 2], "dilation": [2, 2]}
    x, weight, residual, bias = (tensor for tensor, _, _ in first.feeds)
    assert x.dim == [5, 64, 9, 8] and x.stride == [64 * 72, 1, 8 * 64, 64]
    assert weight.dim == [32, 64, 3, 3] and residual.dim == [5, 32, 4, 3] and bias.dim == [1, 32, 1, 1]
    assert first.result.output and first.result.data_type == "HALF"


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("64to64_8_k1s1_b1", ["conv_fprop"]),
        ("64to64_8_k1s1_b1_bias", ["conv_fprop", "bias"]),
        ("64to64_8_k1s1_b1_res+relu", ["conv_fprop", "add", "relu"]),
    ],
)
def test_only_what_is_asked_for_is_drawn(package: FakePackage, name: str, nodes: list[str]) -> None:
    assert [drawing.graph.nodes for drawing in drawn(name)] == [nodes]


def test_fp8_is_scaled_by_filter_and_stored_as_asked(package: FakePackage) -> None:
    (drawing,) = drawn("64to64_8_k1s1_b1_bias+res+relu+out16", "fp8")
    assert drawing.graph.nodes == ["conv_fprop", "mul", "bias", "mul", "add", "relu", "mul"]
    assert drawing.result.data_type == "HALF"
    scales = [(tensor.alignment, offset) for tensor, buffer, offset in drawing.feeds if buffer == "scales"]
    assert scales == [(16, 0), (4, 4)]


def test_gradients(package: FakePackage) -> None:
    (masked,) = drawn("8to16_9_k3s2_b3", operation="conv2d_input_gradient")
    assert masked.graph.nodes == ["conv_dgrad", "relu_backward"]
    assert buffers(masked) == ["gradient", "weight", "mask"]
    (plain,) = drawn("64to16_9_k3s2_b3", operation="conv2d_input_gradient")
    assert plain.graph.nodes == ["conv_dgrad"] and plain.result.dim == [3, 64, 9, 9]
    (weights,) = drawn("64to16_9_k3s2_b3", operation="conv2d_weight_gradient")
    assert weights.graph.nodes == ["conv_wgrad"] and weights.result.dim == [16, 64, 3, 3]
    assert buffers(weights) == ["x", "gradient"]


def test_what_has_no_graph_is_refused(package: FakePackage) -> None:
    with pytest.raises(UnsupportedError, match="no graph for relu"):
        drawn("64to64_8_k1s1_b1", operation="relu")
    with pytest.raises(UnsupportedError, match="second convolution"):
        drawn("64to64_8_k1s1_b1_short64s2")
    nchw = Conv2dProblem.square(64, 64, 8, 1)
    with pytest.raises(UnsupportedError, match="nhwc, not nchw"):
        cudnn_graph.drawings(ops.operation("conv2d"), nchw, {})


def test_plans_are_built_once_each_and_those_that_cannot_be_are_left_out(package: FakePackage) -> None:
    plans, offered = cudnn_graph.built(iter(drawn("64to64_8_k1s1_b1_bias+relu")), "fp16")
    assert [(plan.name, plan.index) for plan in plans] == [("eng1", 0), ("eng4", 4)]
    assert offered == 4, "by name: one of them twice, one that fails, one that needs too much memory"


def test_a_graph_that_is_refused_has_no_plans(package: FakePackage) -> None:
    package.refuses = True
    assert cudnn_graph.built(iter(drawn("64to64_8_k1s1_b1")), "fp16") == ([], 0)


def test_building_stops_in_time_but_not_before_the_first(
    package: FakePackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    package.plans = [("eng0", -1), ("eng1", 0), ("eng2", 0), ("eng3", 0)]
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(cudnn_graph.time, "perf_counter", lambda: next(clock))
    plans, offered = cudnn_graph.built(iter(drawn("64to64_8_k1s1_b1")), "fp16", seconds=1.0)
    assert [plan.name for plan in plans] == ["eng1"] and offered == 4


@pytest.mark.parametrize(("dtype", "barred"), [("fp32", True), ("tf32", False), ("fp16", False)])
def test_tensor_cores_are_barred_where_fp32_is_asked_for(
    package: FakePackage, dtype: str, barred: bool
) -> None:
    (drawing,) = drawn("64to64_8_k1s1_b1", dtype)
    cudnn_graph.built(iter([drawing]), dtype)
    assert ("TENSOR_CORE" in drawing.graph.barred) == barred


def test_a_plan_is_run_over_the_addresses_of_its_buffers(
    package: FakePackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    problem = Conv2dProblem.parse("8to8_4_k1s1_b1_bias", "fp16", "nhwc")
    inputs = ops.operation("conv2d").inputs(problem, torch.device("cpu"), 0)
    y, workspace = torch.empty(1), torch.empty(1)
    drawing = drawn(problem.name)[0]
    plan = cudnn_graph.Plan(drawing, 4, "eng4", 64)
    plan.execute(workspace, "handle", inputs, y)
    ((data, index),) = drawing.graph.executed
    assert index == 4 and data[drawing.result] == y.data_ptr()
    assert [data[tensor] for tensor, _, _ in drawing.feeds] == [
        inputs[name].data_ptr() for name in ("x", "weight", "bias")
    ]
    package.fails = True
    with pytest.raises(LaunchError, match="eng4"):
        plan.execute(workspace, "handle", inputs, y)


def executions(**values: float | None) -> Iterator[tuple[str, cudnn_graph.Execution]]:
    """Fill the result with the plan's value, or fail."""
    for name, value in values.items():

        def execution(inputs: Any, y: torch.Tensor, value: float | None = value) -> None:
            if value is None:
                raise RuntimeError("at run time")
            y.fill_(value)

        yield name, execution


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Results of `screened`, in call order."""
    taken: dict[int, float] = {}
    count = itertools.count()
    real = cudnn_graph.screened

    def fake(execution: cudnn_graph.Execution, inputs: Any, y: torch.Tensor) -> float | None:
        ran = real(execution, inputs, y)
        return None if ran is None else taken[next(count)]

    monkeypatch.setattr(cudnn_graph, "screened", fake)
    return taken


def test_the_fastest_plan_that_is_right_is_kept(times: dict[int, float]) -> None:
    times.update({0: 5.0, 1: 1.0, 2: 3.0})
    offered = dict(executions(slow=1.0, wrong=1.1, broken=None, fast=1.0))
    name, ran = cudnn_graph.best_execution(offered, {}, torch.empty(4), torch.ones(4), AGREEMENT["fp16"])
    assert (name, ran) == ("fast", 3)


def test_no_plan_that_is_right_is_a_refusal(times: dict[int, float]) -> None:
    times.update({0: 5.0})
    with pytest.raises(UnsupportedError, match="2 could be built and 1 run"):
        cudnn_graph.best_execution(
            dict(executions(wrong=2.0, broken=None)), {}, torch.empty(4), torch.ones(4), AGREEMENT["fp32"]
        )


def test_tf32_where_fp32_was_asked_for_does_not_agree() -> None:
    assert AGREEMENT["fp32"] < 2.9e-4 < AGREEMENT["tf32"]


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError("no such library")

    cudnn_graph.frontend.cache_clear()
    monkeypatch.setattr(cudnn_graph.importlib, "import_module", missing)
    with pytest.raises(UnsupportedError, match="nvidia-cudnn-frontend.*no such library"):
        cudnn_graph.cudnn_graph_peers(ops.operation("conv2d"), Conv2dProblem.square(8, 8, 8, 1))
    cudnn_graph.frontend.cache_clear()


def test_a_peer_is_for_its_own_problem(package: FakePackage) -> None:
    conv2d = ops.operation("conv2d")
    problem = Conv2dProblem.square(8, 8, 8, 1, layout="nhwc")
    (peer,) = cudnn_graph.cudnn_graph_peers(conv2d, problem)
    inputs = conv2d.inputs(problem, torch.device("cpu"), 0)
    with pytest.raises(UnsupportedError, match="made for 8to8_8_k1s1_b1"):
        peer.run(Conv2dProblem.square(8, 8, 9, 1, layout="nhwc"), inputs)
    with pytest.raises(UnsupportedError, match="NVIDIA GPU"):
        peer.run(problem, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "fp32", "tf32"])
def test_on_the_gpu_the_best_plan_agrees_with_pytorch(dtype: str) -> None:
    pytest.importorskip("cudnn")
    conv2d = ops.operation("conv2d")
    problem = Conv2dProblem.parse("64to64_28_k3s1_b8_bias+res+relu", dtype, "nhwc")
    inputs = conv2d.inputs(problem, torch.device("cuda", 0), 3)
    (peer,) = cudnn_graph.cudnn_graph_peers(conv2d, problem)
    error = cudnn_graph.relative_error(peer.run(problem, inputs), conv2d.reference(problem, inputs))
    assert error <= AGREEMENT[dtype] and "eng" in peer.note()
