"""cuDNN's graph API as a peer: the fastest plan with a correct result among all that its heuristics offer.

PyTorch calls cuDNN for a convolution, or for one with bias and ReLU. A cuDNN graph holds a convolution with its whole
epilogue, or a gradient, and has dozens of plans: kernels, tile sizes, splits. It needs the package
nvidia-cudnn-frontend, which is not a dependency of Escalade.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from escalade.device.timing import Subject, time_interleaved
from escalade.errors import LaunchError, UnsupportedError
from escalade.ops.base.accuracy import relative_error
from escalade.ops.base.operation import Operation
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.tune.refusal import failure_reason
from escalade_bench.peers.layer import AGREEMENT, Inputs, LayerPeer

SYSTEM = "cudnn-graph"
INSTALL = "pip install nvidia-cudnn-frontend"
WORKSPACE_LIMIT = 2 << 30
BUILD_SECONDS = 5.0
"""Seconds for building all plans of a problem; a plan that is compiled at run time takes up to one."""
SCREENING_SECONDS = 0.002
"""Seconds for timing each plan, once per problem."""
MODES = ("A", "B", "FALLBACK")
_SMALLEST_WORKSPACE = 16  # bytes, so that there is always an address to pass
_ELEMENT = {"fp32": "FLOAT", "tf32": "FLOAT", "fp16": "HALF", "bf16": "BFLOAT16", "fp8": "FP8_E4M3"}
_INEXACT = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS")
"""Numerical notes of plans that fp32 excludes: on tensor cores its products are TF32."""

Execution = Callable[[Inputs, torch.Tensor], None]
"""Computes a result in place from inputs."""


@cache
def frontend() -> Any:
    """Import the package; raise `UnsupportedError` if that fails."""
    try:
        return importlib.import_module("cudnn")
    except Exception as error:  # it loads shared libraries, which fail with other errors too
        raise UnsupportedError(
            f"{SYSTEM} needs the package nvidia-cudnn-frontend ({INSTALL}): {error}"
        ) from error


class Drawing:
    """A cuDNN graph over the tensors of a convolution. All images and filters are in channels_last order."""

    def __init__(self, name: str, p: Conv2dProblem, where: Mapping[str, Any]) -> None:
        image = p.batch, p.channels, p.height, p.width
        result = p.batch, p.filters, p.output_height, p.output_width
        self.name, self.dtype = name, p.dtype
        self.sizes = {"x": image, "mask": image, "residual": result, "gradient": result}
        self.sizes["weight"] = p.filters, p.group_channels, p.filter_height, p.filter_width
        self.geometry = {"padding": list(p.padding), "stride": list(p.stride), "dilation": list(p.dilation)}
        self.graph = frontend().pygraph(
            io_data_type=self.type(p.dtype),
            intermediate_data_type=self.type("fp32"),
            compute_data_type=self.type("fp32"),
            **where,
        )
        self.feeds: list[tuple[Any, str, int]] = []
        """Input tensors, each with the name of its buffer and the offset in bytes."""
        self.result: Any = None

    def type(self, dtype: str) -> Any:
        return getattr(frontend().data_type, _ELEMENT[dtype])

    def input(self, buffer: str, channels: int = 0, dtype: str = "", offset: int = 0) -> Any:
        """Add an input: an image or filters by name, or a vector with one value per channel."""
        size = (1, channels, 1, 1) if channels else self.sizes[buffer]
        data_type = self.type(dtype or self.dtype)
        tensor = self.graph.tensor(dim=list(size), stride=_nhwc(size), data_type=data_type)
        if offset:
            tensor.set_alignment(offset)
        self.feeds.append((tensor, buffer, offset))
        return tensor

    def finish(self, result: Any, dtype: str = "") -> Drawing:
        result.set_output(True).set_data_type(self.type(dtype or self.dtype))
        self.result = result
        return self


def _nhwc(size: tuple[int, ...]) -> list[int]:
    _, channels, height, width = size
    return [channels * height * width, 1, width * channels, channels]


def _sized(tensor: Any, size: tuple[int, ...]) -> Any:
    """Set the size of a gradient, which does not follow from the inputs."""
    tensor.set_dim(list(size)).set_stride(_nhwc(size))
    return tensor


def drawings(operation: Operation[Any], problem: Any, where: Mapping[str, Any]) -> Iterator[Drawing]:
    """Build all graphs that compute a problem; `where` has the handle of a device, or its properties."""
    draw = _DRAW.get(operation.name)
    if draw is None:
        raise UnsupportedError(f"{SYSTEM} has no graph for {operation.name}; it has {', '.join(_DRAW)}")
    if problem.layout != "nhwc":
        raise UnsupportedError(f"{SYSTEM} takes nhwc, not {problem.layout}")
    return draw(problem, where)


def _forward(p: Conv2dProblem, where: Mapping[str, Any]) -> Iterator[Drawing]:
    """cuDNN's precompiled kernels add the residual before the bias; those compiled at run time take either order."""
    missing = {
        "a second convolution": p.shortcut_channels,
        "pooling": p.pools,
        "int8": p.dtype == "int8",
        f"the prologue {p.prologue}": p.prologue,
        f"the activation {p.activation}": p.activation,
    }
    for part, present in missing.items():
        if present:
            raise UnsupportedError(
                f"{SYSTEM} has graphs of a convolution with bias, residual and ReLU, not {part}"
            )
    if p.dtype == "fp8":
        yield _forward_in_order(p, where, "scaled", ("bias", "residual"))
        return
    yield _forward_in_order(p, where, "residual-first", ("residual", "bias"))
    if p.residual and p.bias:
        yield _forward_in_order(p, where, "bias-first", ("bias", "residual"))


def _forward_in_order(
    p: Conv2dProblem, where: Mapping[str, Any], name: str, order: tuple[str, str]
) -> Drawing:
    """Build convolution, epilogue and ReLU. In FP8, scale by filter, then the residual and result by `scales`."""
    drawing, fp8 = Drawing(name, p, where), p.dtype == "fp8"
    graph = drawing.graph
    y = graph.conv_fprop(image=drawing.input("x"), weight=drawing.input("weight"), **drawing.geometry)
    if fp8:
        y = graph.mul(a=y, b=drawing.input("scale", p.filters, "fp32"))
    for term in order:
        if term == "bias" and p.bias:
            y = graph.bias(input=y, bias=drawing.input("bias", p.filters, "fp32" if fp8 else p.dtype))
        elif term == "residual" and p.residual:
            residual = drawing.input("residual")
            if fp8:
                residual = graph.mul(a=residual, b=drawing.input("scales", 1, "fp32"))
            y = graph.add(a=y, b=residual)
    if p.relu:
        y = graph.relu(input=y)
    if fp8:
        y = graph.mul(a=y, b=drawing.input("scales", 1, "fp32", offset=4))
    return drawing.finish(y, p.output)


def _input_gradient(problem: Any, where: Mapping[str, Any]) -> Iterator[Drawing]:
    masked = getattr(problem, "mask", False)
    drawing = Drawing("masked-input-gradient" if masked else "input-gradient", problem.forward, where)
    gradient, weight = drawing.input("gradient"), drawing.input("weight")
    y = drawing.graph.conv_dgrad(loss=gradient, filter=weight, **drawing.geometry)
    y = _sized(y, drawing.sizes["x"])
    if masked:
        y = drawing.graph.relu_backward(loss=y, input=drawing.input("mask"))
    yield drawing.finish(y)


def _weight_gradient(problem: Any, where: Mapping[str, Any]) -> Iterator[Drawing]:
    drawing = Drawing("weight-gradient", problem.forward, where)
    x, gradient = drawing.input("x"), drawing.input("gradient")
    y = drawing.graph.conv_wgrad(image=x, loss=gradient, **drawing.geometry)
    yield drawing.finish(_sized(y, drawing.sizes["weight"]))


_DRAW: dict[str, Callable[[Any, Mapping[str, Any]], Iterator[Drawing]]] = {
    "conv2d": _forward,
    "conv2d_input_gradient": _input_gradient,
    "conv2d_weight_gradient": _weight_gradient,
}


@dataclass(frozen=True)
class Plan:
    """One execution plan of a graph."""

    drawing: Drawing
    index: int
    name: str
    workspace_bytes: int

    def execute(self, workspace: torch.Tensor, handle: Any, inputs: Inputs, y: torch.Tensor) -> None:
        """Execute the plan on PyTorch's current stream."""
        frontend().set_stream(handle=handle, stream=torch.cuda.current_stream(y.device).cuda_stream)
        data = {tensor: inputs[buffer].data_ptr() + offset for tensor, buffer, offset in self.drawing.feeds}
        data[self.drawing.result] = y.data_ptr()
        try:
            self.drawing.graph.execute_plan_at_index(data, workspace.data_ptr(), self.index, handle=handle)
        except Exception as error:
            raise LaunchError(f"cuDNN's plan {self.name}: {failure_reason(error)}") from error


def built(
    drawn: Iterable[Drawing], dtype: str, seconds: float = BUILD_SECONDS, limit: int = WORKSPACE_LIMIT
) -> tuple[list[Plan], int]:
    """Build plans in the order of cuDNN's heuristics until the time is over; return them and the number offered.

    Graphs that cuDNN refuses and plans that it cannot build are skipped.
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
            except Exception as refused:
                failure_reason(refused)  # raises interrupts again
                continue
            if workspace <= limit:
                plans.append(Plan(drawing, index, name, workspace))
    return plans, offered


def _offered(drawing: Drawing, dtype: str) -> dict[str, int]:
    """Return the plans of a graph by name; none if cuDNN refuses it."""
    package, graph = frontend(), drawing.graph
    names: dict[str, int] = {}
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([getattr(package.heur_mode, mode) for mode in MODES])
        if dtype == "fp32":
            graph.deselect_numeric_notes([getattr(package.numerical_note, note) for note in _INEXACT])
        for index in range(graph.get_execution_plan_count()):
            names.setdefault(str(graph.get_plan_name_at_index(index)), index)
    except Exception as refused:
        failure_reason(refused)  # raises interrupts again
        return {}
    return names


def best_execution(
    executions: Mapping[str, Execution],
    inputs: Inputs,
    y: torch.Tensor,
    right: torch.Tensor,
    agreement: float,
) -> tuple[str, int]:
    """Return the fastest execution that agrees with PyTorch's result, and the number that ran; all write to `y`."""
    timed = {name: screened(execution, inputs, y) for name, execution in executions.items()}
    times = {name: us for name, us in timed.items() if us is not None}
    for name in sorted(times, key=lambda name: times[name]):
        y.fill_(math.nan)
        executions[name](inputs, y)
        if relative_error(y, right) <= agreement:
            return name, len(times)
    raise UnsupportedError(
        f"of cuDNN's plans {len(executions)} could be built and {len(times)} run; none gives the right result"
    )


def screened(execution: Execution, inputs: Inputs, y: torch.Tensor) -> float | None:
    """Time an execution briefly, in microseconds; return None if it fails."""
    subject = Subject("plan", [lambda: execution(inputs, y)])
    try:
        timings = time_interleaved(
            [subject], y.device, seconds_each=SCREENING_SECONDS, min_rounds=3, replay_us=100.0
        )
    except Exception as refused:
        failure_reason(refused)  # raises interrupts again
        return None
    return timings[subject.name].median_us


def cudnn_graph_peers(operation: Operation[Any], problem: Any) -> list[LayerPeer]:
    """Make the peer for one problem; its first call times all plans over its inputs, and keeps the fastest.

    Raise `UnsupportedError` without the package.
    """
    frontend()
    chosen: list[tuple[Execution, str]] = []

    def run(given: Any, inputs: Inputs) -> torch.Tensor:
        if given != problem:
            raise UnsupportedError(f"this peer was made for {problem.name} {problem.dtype} {problem.layout}")
        y = operation.output(problem, next(iter(inputs.values())).device)
        if not chosen:
            chosen.append(_choose(operation, problem, inputs, y))
        chosen[0][0](inputs, y)
        return y

    return [LayerPeer(SYSTEM, "nhwc", run, lambda: chosen[0][1] if chosen else "")]


def _choose(
    operation: Operation[Any], problem: Any, inputs: Inputs, y: torch.Tensor
) -> tuple[Execution, str]:
    """Return the fastest execution, and a note on its plan."""
    if not y.is_cuda:
        raise UnsupportedError(f"{SYSTEM} runs on an NVIDIA GPU, not on {y.device}")
    handle = _handle(y.device)
    plans, offered = built(drawings(operation, problem, {"handle": handle}), problem.dtype)
    size = max((plan.workspace_bytes for plan in plans), default=0)
    workspace = torch.empty(max(size, _SMALLEST_WORKSPACE), dtype=torch.uint8, device=y.device)
    executions = {
        f"{plan.drawing.name} {plan.name}": partial(plan.execute, workspace, handle) for plan in plans
    }
    right = operation.peer(problem, inputs)
    name, ran = best_execution(executions, inputs, y, right, AGREEMENT[problem.dtype])
    note = f"{name}: the fastest of {ran} plans that ran, {len(plans)} built, {offered} offered"
    return executions[name], note


@cache
def _handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return frontend().create_handle()
