"""cuDNN's graphs as a peer: of all the plans that its heuristics offer for a convolution, the fastest that is right.

PyTorch asks cuDNN for a convolution, or for one with a bias and a ReLU. A graph of cuDNN's own holds what belongs
together (convolution, residual, bias, ReLU, or a gradient) and has dozens of plans: kernels, tile sizes, splits. It
needs the package nvidia-cudnn-frontend, which Escalade does not depend on.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from escalade.bench.peers.catalogue import CUDNN_FRONTEND
from escalade.bench.peers.layer import AGREEMENT, Inputs, LayerPeer
from escalade.device.timing import Subject, time_interleaved
from escalade.errors import LaunchError, UnsupportedError
from escalade.measure.refusal import reason
from escalade.ops.base.accuracy import relative_error
from escalade.ops.base.operation import Operation
from escalade.ops.conv2d.problem import Conv2dProblem

SYSTEM = "cudnn-graph"
WORKSPACE_LIMIT = 2 << 30
BUILD_SECONDS = 5.0
"""Seconds for all plans of a problem: those that cuDNN compiles at run time take up to a second each."""
SCREENING_SECONDS = 0.002
"""Seconds for each plan, once for a problem."""
MODES = ("A", "B", "FALLBACK")
_SMALLEST_WORKSPACE = 16  # so that there is an address even where none is needed
_ELEMENT = {"fp32": "FLOAT", "tf32": "FLOAT", "fp16": "HALF", "bf16": "BFLOAT16", "fp8": "FP8_E4M3"}
_EXACT = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS")
"""Notes of what fp32 must not do: on tensor cores its products are TF32."""


Execution = Callable[[Inputs, torch.Tensor], None]
"""Fills a result from inputs."""


@cache
def frontend() -> Any:
    """The package, whatever is wrong with it said in one sentence."""
    try:
        return importlib.import_module(CUDNN_FRONTEND.name)
    except Exception as error:  # it loads libraries of its own, which fail in ways of their own
        raise UnsupportedError(
            f"{SYSTEM} needs the package nvidia-cudnn-frontend ({CUDNN_FRONTEND.install}): {error}"
        ) from error


@dataclass(frozen=True)
class Feed:
    """A tensor of a graph, and where its data is: a buffer, moved on by `offset` bytes."""

    tensor: Any
    buffer: str
    offset: int = 0


@dataclass(frozen=True)
class Drawing:
    """A graph with what goes in and what comes out."""

    name: str
    graph: Any
    feeds: tuple[Feed, ...]
    result: Any


@dataclass(frozen=True)
class Plan:
    """One execution plan of a graph."""

    drawing: Drawing
    index: int
    name: str
    workspace_bytes: int

    def execution(self, workspace: torch.Tensor, handle: Any) -> Execution:
        """What executes the plan on PyTorch's current stream."""

        def run(inputs: Inputs, y: torch.Tensor) -> None:
            frontend().set_stream(handle=handle, stream=torch.cuda.current_stream(y.device).cuda_stream)
            data = {feed.tensor: inputs[feed.buffer].data_ptr() + feed.offset for feed in self.drawing.feeds}
            data[self.drawing.result] = y.data_ptr()
            try:
                self.drawing.graph.execute_plan_at_index(
                    data, workspace.data_ptr(), self.index, handle=handle
                )
            except Exception as error:
                raise LaunchError(f"cuDNN's plan {self.name}: {reason(error)}") from error

        return run


class CudnnGraph:
    """The peer for one problem. The first call chooses its plan, by measurement over the inputs of that call."""

    def __init__(self, operation: Operation[Any], problem: Any) -> None:
        self.operation = operation
        self.problem = problem
        self.note = ""
        self._chosen: Execution | None = None

    def run(self, problem: Any, inputs: Inputs) -> torch.Tensor:
        if problem != self.problem:
            raise UnsupportedError(
                f"this peer was made for {self.problem.name} {self.problem.dtype} {self.problem.layout}"
            )
        y = self.operation.output(problem, next(iter(inputs.values())).device)
        if self._chosen is None:
            self._chosen = self._choose(inputs, y)
        self._chosen(inputs, y)
        return y

    def _choose(self, inputs: Inputs, y: torch.Tensor) -> Execution:
        if not y.is_cuda:
            raise UnsupportedError(f"{SYSTEM} runs on an NVIDIA GPU, not on {y.device}")
        handle = _handle(y.device)
        plans, offered = built(drawings(self.operation, self.problem, {"handle": handle}), self.problem.dtype)
        room = max((plan.workspace_bytes for plan in plans), default=0)
        workspace = torch.empty(max(room, _SMALLEST_WORKSPACE), dtype=torch.uint8, device=y.device)
        executions = {f"{plan.drawing.name} {plan.name}": plan.execution(workspace, handle) for plan in plans}
        right = self.operation.peer(self.problem, inputs)
        name, ran = best_execution(executions, inputs, y, right, AGREEMENT[self.problem.dtype])
        self.note = f"{name}: the fastest of {ran} plans that ran, {len(plans)} built, {offered} offered"
        return executions[name]


def cudnn_graph_peer(operation: Operation[Any], problem: Any) -> LayerPeer:
    """The peer for one problem, whose note names its plan once it has run; `UnsupportedError` without the package."""
    frontend()
    search = CudnnGraph(operation, problem)
    return LayerPeer(SYSTEM, "nhwc", search.run, lambda: search.note)


@cache
def _handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return frontend().create_handle()


def best_execution(
    executions: Mapping[str, Execution],
    inputs: Inputs,
    y: torch.Tensor,
    right: torch.Tensor,
    agreement: float,
) -> tuple[str, int]:
    """The fastest whose result agrees with PyTorch's, and how many ran at all. All of them write to `y`."""
    times = {
        name: us
        for name, execution in executions.items()
        if (us := screened(execution, inputs, y)) is not None
    }
    for name in sorted(times, key=lambda name: times[name]):
        y.fill_(math.nan)
        executions[name](inputs, y)
        if relative_error(y, right) <= agreement:
            return name, len(times)
    raise UnsupportedError(
        f"of cuDNN's plans {len(executions)} could be built and {len(times)} run; none gives the right result"
    )


def screened(execution: Execution, inputs: Inputs, y: torch.Tensor) -> float | None:
    """Microseconds by a short look; None if it does not run."""
    subject = Subject("plan", [lambda: execution(inputs, y)])
    try:
        timings = time_interleaved(
            [subject], y.device, seconds_each=SCREENING_SECONDS, min_rounds=3, replay_us=100.0
        )
    except Exception as refused:  # whatever it is, there are other plans
        reason(refused)  # unless it was an interrupt
        return None
    return timings[subject.name].median_us


def built(
    drawn: Iterator[Drawing], dtype: str, seconds: float = BUILD_SECONDS, limit: int = WORKSPACE_LIMIT
) -> tuple[list[Plan], int]:
    """The plans that can be built in that time, each once, in the order of cuDNN's heuristics; and how many there are.

    A graph that cuDNN refuses, and a plan that it cannot build, is left out.
    """
    deadline = time.perf_counter() + seconds
    plans: list[Plan] = []
    offered = 0
    for drawing in drawn:
        names = _offered(drawing, dtype)
        offered += len(names)
        for name, index in names.items():
            if time.perf_counter() > deadline and plans:
                break
            try:
                drawing.graph.build_plan_at_index(index)
                workspace = int(drawing.graph.get_workspace_size_plan_at_index(index))
            except Exception as refused:  # one of cuDNN's many reasons
                reason(refused)  # unless it was an interrupt
                continue
            if workspace <= limit:
                plans.append(Plan(drawing, index, name, workspace))
    return plans, offered


def _offered(drawing: Drawing, dtype: str) -> dict[str, int]:
    """The plans of a graph by name; none if cuDNN refuses it."""
    package, graph = frontend(), drawing.graph
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([getattr(package.heur_mode, mode) for mode in MODES])
        if dtype == "fp32":
            graph.deselect_numeric_notes([getattr(package.numerical_note, note) for note in _EXACT])
        names: dict[str, int] = {}
        for index in range(graph.get_execution_plan_count()):
            names.setdefault(str(graph.get_plan_name_at_index(index)), index)
    except Exception as refused:
        reason(refused)  # unless it was an interrupt
        return {}
    return names


def drawings(operation: Operation[Any], problem: Any, where: Mapping[str, Any]) -> Iterator[Drawing]:
    """The graphs that do a problem. `where` says for which device: a handle, or properties of one."""
    draw = _DRAW.get(operation.name)
    if draw is None:
        raise UnsupportedError(f"{SYSTEM} has no graph for {operation.name}; it has {', '.join(_DRAW)}")
    if problem.layout != "nhwc":
        raise UnsupportedError(f"{SYSTEM} takes nhwc, not {problem.layout}")
    return draw(problem, where)


class _Sketch:
    """A graph while it is drawn."""

    def __init__(self, dtype: str, where: Mapping[str, Any]) -> None:
        self.types = frontend().data_type
        self.element = self.type(dtype)
        self.graph = frontend().pygraph(
            io_data_type=self.element,
            intermediate_data_type=self.types.FLOAT,
            compute_data_type=self.types.FLOAT,
            **where,
        )
        self._feeds: list[Feed] = []

    def type(self, dtype: str) -> Any:
        return getattr(self.types, _ELEMENT[dtype])

    def image(self, buffer: str, *size: int) -> Any:
        """Four dimensions in the order N, C, H, W, of which C is innermost in memory; filters alike."""
        return self._fed(
            self.graph.tensor(dim=list(size), stride=_nhwc(size), data_type=self.element), buffer
        )

    def vector(self, buffer: str, size: int, dtype: str, offset: int = 0) -> Any:
        """One value a channel, or one for all."""
        dims = (1, size, 1, 1)
        tensor = self.graph.tensor(dim=list(dims), stride=_nhwc(dims), data_type=self.type(dtype))
        if offset:
            tensor.set_alignment(offset)
        return self._fed(tensor, buffer, offset)

    def _fed(self, tensor: Any, buffer: str, offset: int = 0) -> Any:
        self._feeds.append(Feed(tensor, buffer, offset))
        return tensor

    def finished(self, name: str, result: Any, dtype: str, size: tuple[int, ...] | None = None) -> Drawing:
        """`size` where it does not follow from what goes in."""
        if size is not None:
            result.set_dim(list(size)).set_stride(_nhwc(size))
        result.set_output(True).set_data_type(self.type(dtype))
        return Drawing(name, self.graph, tuple(self._feeds), result)


def _nhwc(size: tuple[int, ...]) -> list[int]:
    _, channels, height, width = size
    return [channels * height * width, 1, width * channels, channels]


def _geometry(p: Conv2dProblem) -> dict[str, list[int]]:
    return {"padding": list(p.padding), "stride": list(p.stride), "dilation": list(p.dilation)}


def _image_size(p: Conv2dProblem) -> tuple[int, int, int, int]:
    return p.batch, p.channels, p.height, p.width


def _filter_size(p: Conv2dProblem) -> tuple[int, int, int, int]:
    return p.filters, p.group_channels, p.filter_height, p.filter_width


def _result_size(p: Conv2dProblem) -> tuple[int, int, int, int]:
    return p.batch, p.filters, p.output_height, p.output_width


def _forward(p: Conv2dProblem, where: Mapping[str, Any]) -> Iterator[Drawing]:
    """cuDNN's ready-made kernels know the order convolution, residual, bias; those it compiles know both."""
    if p.shortcut_channels:
        raise UnsupportedError(f"{SYSTEM} has no graph for a second convolution")
    if p.pools:
        raise UnsupportedError(f"{SYSTEM} is asked for convolutions, not for the maxima of their windows")
    if p.prologue:
        raise UnsupportedError(f"{SYSTEM} is asked for convolutions of x as it is, not of {p.prologue}")
    if p.activation:
        raise UnsupportedError(f"{SYSTEM} is asked for ReLU alone, not for {p.activation}")
    if p.dtype == "fp8":
        yield _forward_scaled(p, where)
        return
    yield _forward_in_order(p, where, ("residual", "bias"))
    if p.residual and p.bias:
        yield _forward_in_order(p, where, ("bias", "residual"))


def _convolved(sketch: _Sketch, p: Conv2dProblem) -> Any:
    x, weight = sketch.image("x", *_image_size(p)), sketch.image("weight", *_filter_size(p))
    return sketch.graph.conv_fprop(image=x, weight=weight, **_geometry(p))


def _forward_in_order(p: Conv2dProblem, where: Mapping[str, Any], order: tuple[str, ...]) -> Drawing:
    sketch = _Sketch(p.dtype, where)
    y = _convolved(sketch, p)
    for term in order:
        if term == "bias" and p.bias:
            y = sketch.graph.bias(input=y, bias=sketch.vector("bias", p.filters, p.dtype))
        elif term == "residual" and p.residual:
            y = sketch.graph.add(a=y, b=sketch.image("residual", *_result_size(p)))
    if p.relu:
        y = sketch.graph.relu(input=y)
    return sketch.finished(f"{order[0]}-first", y, p.output or p.dtype)


def _forward_scaled(p: Conv2dProblem, where: Mapping[str, Any]) -> Drawing:
    """The graph in FP8: scaled by filter, then bias and residual, all times the result's unit."""
    sketch = _Sketch(p.dtype, where)
    graph = sketch.graph
    y = graph.mul(a=_convolved(sketch, p), b=sketch.vector("scale", p.filters, "fp32"))
    if p.bias:
        y = graph.bias(input=y, bias=sketch.vector("bias", p.filters, "fp32"))
    if p.residual:
        residual = sketch.image("residual", *_result_size(p))
        y = graph.add(a=y, b=graph.mul(a=residual, b=sketch.vector("scales", 1, "fp32")))
    if p.relu:
        y = graph.relu(input=y)
    y = graph.mul(a=y, b=sketch.vector("scales", 1, "fp32", offset=4))
    return sketch.finished("scaled", y, p.output or p.dtype)


def _input_gradient(problem: Any, where: Mapping[str, Any]) -> Iterator[Drawing]:
    p: Conv2dProblem = problem.forward
    sketch = _Sketch(p.dtype, where)
    gradient = sketch.image("gradient", *_result_size(p))
    weight = sketch.image("weight", *_filter_size(p))
    y = sketch.graph.conv_dgrad(loss=gradient, filter=weight, **_geometry(p))
    if not getattr(problem, "mask", False):
        yield sketch.finished("input-gradient", y, p.dtype, _image_size(p))
        return
    y.set_dim(list(_image_size(p))).set_stride(_nhwc(_image_size(p)))
    y = sketch.graph.relu_backward(loss=y, input=sketch.image("mask", *_image_size(p)))
    yield sketch.finished("masked-input-gradient", y, p.dtype)


def _weight_gradient(problem: Any, where: Mapping[str, Any]) -> Iterator[Drawing]:
    p: Conv2dProblem = problem.forward
    sketch = _Sketch(p.dtype, where)
    x, gradient = sketch.image("x", *_image_size(p)), sketch.image("gradient", *_result_size(p))
    y = sketch.graph.conv_wgrad(image=x, loss=gradient, **_geometry(p))
    yield sketch.finished("weight-gradient", y, p.dtype, _filter_size(p))


_DRAW: dict[str, Callable[[Any, Mapping[str, Any]], Iterator[Drawing]]] = {
    "conv2d": _forward,
    "conv2d_input_gradient": _input_gradient,
    "conv2d_weight_gradient": _weight_gradient,
}
