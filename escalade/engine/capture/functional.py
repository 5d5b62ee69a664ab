"""Conversion of AOTAutograd's functional graphs with fixed sizes into typed graphs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from escalade.engine.capture.reader import CaptureError, FxReader
from escalade.engine.graph.aten import bound_arguments
from escalade.engine.graph.forms import InputFormat
from escalade.engine.graph.graph import Graph, Node, dtype_name
from escalade.ops.ctc_loss import ctc_loss_in_step

Functions = Mapping[torch._ops.OpOverload, Callable[..., Any]]
"""Functions to trace in place of PyTorch's operators."""
_ASSERTIONS = ("aten::_assert_tensor_metadata", "aten::_assert_async.msg", "aten::_assert_scalar")
# Single-kernel operators that AOTAutograd would decompose: upsampling into gathers and scatters of single elements, and
# the multi-label margin loss into a form that also counts labels after the terminating -1.
_DECOMPOSED = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_trilinear3d", "upsample_bicubic2d", "multilabel_margin_loss_forward",
)  # fmt: skip


class FunctionalReader(FxReader):
    """Reads a module of AOTAutograd node by node."""

    def __init__(self, module: torch.fx.GraphModule, title: str) -> None:
        super().__init__()
        for node in module.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target.name() in _ASSERTIONS:
                module.graph.erase_node(node)
        _strided_views_to_reshapes(module.graph)
        _complete_batch_norms(module.graph)
        _layers_to_images(module.graph)
        _adaptive_to_max_pools(module.graph)
        module.graph.eliminate_dead_code()
        self._module = module
        self._title = title
        self.constants: list[torch.Tensor] = []
        """Constant tensors of the module; the graph holds copies of them."""
        self._sources: dict[torch.fx.Node, str] = {}
        """Module that each parameter, or cast of one, belongs to."""

    def read(self, names: Sequence[str], sources: Sequence[str]) -> Graph:
        """Return a graph without outputs; each input has a name and the module that it belongs to."""
        graph = Graph((), {}, {}, (), typed=True)
        nodes = self._module.graph.nodes
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self._sources.update(zip(placeholders, sources, strict=True))
        named = zip(placeholders, names, strict=True)
        tensors = [pair for pair in named if isinstance(pair[0].meta.get("val"), torch.Tensor)]
        self._add_inputs(graph, [node for node, _ in tensors], [name for _, name in tensors])
        for node in nodes:
            if node.op == "call_function":
                self._call(graph, node)
            elif node.op == "get_attr":
                self._constant(graph, node)
        return graph

    @property
    def results(self) -> list[Any]:
        """Results of the module: nodes, numbers or None."""
        return list(next(node for node in self._module.graph.nodes if node.op == "output").args[0])

    def set_outputs(self, graph: Graph, results: Sequence[torch.fx.Node]) -> None:
        graph.outputs = tuple(map(self._value, results))
        graph.output_types = tuple(dtype_name(node.meta["val"].dtype) for node in results)
        graph.remove_dead_code()

    def _constant(self, graph: Graph, node: torch.fx.Node) -> None:
        tensor = getattr(self._module, str(node.target), None)
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor):
            raise CaptureError(
                f"{self._title} contains a control-flow operator ({node.target}); a plan runs the same operations at "
                "every call"
            )
        self.constants.append(tensor)
        self._values[node] = graph.add_constant(str(node.target), tensor.detach().clone())

    def _node(self, graph: Graph, fx: torch.fx.Node, call: torch.fx.Node, *rest: Any) -> Node:
        """Give batch statistics the dtype of the BatchNorm weights, as PyTorch does; its fake kernels report x's."""
        node = super()._node(graph, fx, call, *rest)
        if call.target is torch.ops.aten._native_batch_norm_legit_functional.default and fx.args[1] in (1, 2):
            others = [graph.dtype_of(name) for role, name in node.inputs.items() if role != "in0"]
            fp32 = next((dtype for dtype in others if dtype.itemsize > 2), None)
            node = node if fp32 is None else replace(node, dtype=dtype_name(fp32))
        return node

    def _source(self, call: torch.fx.Node) -> str:
        """Return the module whose parameters the call reads, if there is exactly one."""
        sources = {self._sources.get(argument, "") for argument in call.all_input_nodes} - {""}
        source = sources.pop() if len(sources) == 1 else ""
        if call.target is torch.ops.aten._to_copy.default:
            self._sources[call] = source
        return source


def _strided_views_to_reshapes(graph: torch.fx.Graph) -> None:
    """Replace `as_strided` calls that only change sizes by `reshape`."""
    for node in list(graph.nodes):
        source = _reshape_source(node)
        if source is None:
            continue
        with graph.inserting_before(node):
            view = graph.call_function(torch.ops.aten.reshape.default, (source, list(node.meta["val"].shape)))
        view.meta = dict(node.meta)
        node.replace_all_uses_with(view)
        graph.erase_node(node)


def _reshape_source(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the tensor that a strided view, or a strided write over a whole dense tensor, only reshapes."""
    is_view = node.target is torch.ops.aten.as_strided.default
    if not is_view and node.target is not torch.ops.aten.as_strided_scatter.default:
        return None
    bound = bound_arguments(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    whole, part = bound["self"].meta["val"], node.meta["val"] if is_view else bound["src"].meta["val"]
    if whole.numel() != part.numel() or bound.get("storage_offset") or whole.storage_offset():
        return None
    for sizes, strides in ((bound["size"], bound["stride"]), (whole.shape, whole.stride())):
        if not _same_strides(sizes, strides, torch.empty(tuple(sizes), device="meta").stride()):
            return None
    source: torch.fx.Node = bound["self"] if is_view else bound["src"]
    return source


def _complete_batch_norms(graph: torch.fx.Graph) -> None:
    """Give batch normalizations weight, bias and running statistics where they have none.

    That of one image without running statistics is an instance norm, a group norm in plans.
    """
    aten = torch.ops.aten
    with_running = aten._native_batch_norm_legit_functional.default
    for node in list(graph.nodes):
        if node.target is aten._native_batch_norm_legit.no_stats and _is_batch(node.args[0]):
            x, weight, bias, *rest = node.args
            mean, variance = (_per_channel(graph, node, x, number) for number in (0.0, 1.0))
            node.target = with_running
            node.args = (x, weight, bias, mean, variance, *rest)
            node.meta["val"] = (*node.meta["val"], mean.meta["val"], variance.meta["val"])
        if node.target is with_running and node.args[1] is None and node.args[2] is None:
            filled = (_per_channel(graph, node, node.args[0], number) for number in (1.0, 0.0))
            node.args = (node.args[0], *filled, *node.args[3:])
        elif node.target is aten.native_batch_norm_backward.default and node.args[2] is None:
            if node.args[3] is None and not _is_batch(node.args[1]):
                continue
            node.args = (*node.args[:2], _per_channel(graph, node, node.args[1], 1.0), *node.args[3:])


def _is_batch(x: torch.fx.Node) -> bool:
    return bool(x.meta["val"].shape[0] != 1)


def _per_channel(
    graph: torch.fx.Graph, before: torch.fx.Node, x: torch.fx.Node, number: float
) -> torch.fx.Node:
    """Return a vector of one number for the channels of x, in the dtype of statistics."""
    value = x.meta["val"]
    options = {"dtype": torch.promote_types(value.dtype, torch.float32), "device": value.device}
    with graph.inserting_before(before):
        vector = graph.call_function(torch.ops.aten.full.default, ([value.shape[1]], number), options)
    vector.meta["val"] = value.new_full((value.shape[1],), number, dtype=options["dtype"])
    return vector


@dataclass(frozen=True)
class _OnImages:
    """An operator on sequences, volumes or rows as one on images: the same elements in four dimensions."""

    tensors: tuple[str, ...]
    """Arguments that are viewed as images."""
    results: tuple[int, ...]
    """Results that are; of an operator with one result, the first."""
    windows: Mapping[str, int]
    """Arguments with one number per dimension, and that of a dimension of size 1; only sequences have windows here."""

    def takes(self, rank: int) -> bool:
        return rank == _SEQUENCE_RANK if self.windows else rank != _IMAGE_RANK


_SEQUENCE_RANK, _IMAGE_RANK, _VOLUME_RANK = 3, 4, 5
_WINDOWS = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}
_ON_IMAGES = {
    torch.ops.aten.convolution.default: _OnImages(("input", "weight"), (0,), _WINDOWS),
    torch.ops.aten.convolution_backward.default: _OnImages(
        ("grad_output", "input", "weight"), (0, 1), _WINDOWS
    ),
    torch.ops.aten._native_batch_norm_legit_functional.default: _OnImages(("input",), (0,), {}),
    torch.ops.aten.native_batch_norm_backward.default: _OnImages(("grad_out", "input"), (0,), {}),
}


def _layers_to_images(graph: torch.fx.Graph) -> None:
    """Apply convolutions of sequences, and batch normalizations of anything, to images."""
    for node in list(graph.nodes):
        form = _ON_IMAGES.get(node.target)
        if form is None:
            continue
        bound = bound_arguments(node.target, node.args, node.kwargs)
        if not form.takes(bound[form.tensors[0]].meta["val"].dim()):
            continue
        for name in form.tensors:
            with graph.inserting_before(node):
                bound[name] = _reshaped(graph, bound[name], _image_sizes(bound[name].meta["val"].shape))
        for name, neutral in form.windows.items():
            if name in bound:
                bound[name] = [neutral, *bound[name]]
        node.args = tuple(bound.get(argument.name) for argument in node.target._schema.arguments)
        node.kwargs = {}
        values = node.meta["val"]
        if isinstance(values, torch.Tensor):
            _view_result(graph, node, values)
            continue
        for user in list(node.users):
            if user.args[1] in form.results:
                _view_result(graph, user, values[user.args[1]])
        node.meta["val"] = tuple(
            value.reshape(_image_sizes(value.shape)) if index in form.results and value is not None else value
            for index, value in enumerate(values)
        )


def _adaptive_to_max_pools(graph: torch.fx.Graph) -> None:
    """Replace adaptive maxima, and their gradients, by those of windows of one size where all are."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.target is aten.adaptive_max_pool2d.default:
            x, rest = node.args[0], []
            pooled = node.meta["val"][0].shape
        elif node.target is aten.adaptive_max_pool2d_backward.default:
            _, x, *rest = node.args
            pooled = node.args[0].meta["val"].shape
        else:
            continue
        sides = list(zip(x.meta["val"].shape[-2:], pooled[-2:], strict=True))
        if any(not own or side % own for side, own in sides):
            continue
        window = [side // own for side, own in sides]
        if rest:
            node.target = aten.max_pool2d_with_indices_backward.default
            node.args = (node.args[0], x, window, window, [0, 0], [1, 1], False, *rest)
        else:
            node.target = aten.max_pool2d_with_indices.default
            node.args = (x, window, window)


def _image_sizes(shape: Sequence[int]) -> list[int]:
    """Return the sizes of an image with the same elements per channel, in the same order.

    Those of volumes have a frame's pixels in each row.
    """
    batch, channels, *places = shape
    if len(places) > 2:
        return [batch, channels, places[0], math.prod(places[1:])]
    return [batch, channels, math.prod(places[:-1]), *(places[-1:] or [1])]


def _view_result(graph: torch.fx.Graph, node: torch.fx.Node, value: torch.Tensor) -> None:
    """Make a result an image, and have its users read it in its own shape."""
    node.meta["val"] = value.reshape(_image_sizes(value.shape))
    with graph.inserting_after(node):
        back = _reshaped(graph, node, list(value.shape))
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)


def _reshaped(graph: torch.fx.Graph, node: torch.fx.Node, sizes: list[int]) -> torch.fx.Node:
    view = graph.call_function(torch.ops.aten.reshape.default, (node, sizes))
    view.meta = {**node.meta, "val": node.meta["val"].reshape(sizes)}
    return view


def _same_strides(sizes: Any, first: Any, second: Any) -> bool:
    """Compare strides, except in dimensions of size 1, where they are arbitrary."""
    return all(size <= 1 or a == b for size, a, b in zip(sizes, first, second, strict=True))


@contextmanager
def operators_with_kernels(more: Functions = MappingProxyType({})) -> Iterator[None]:
    """Have AOTAutograd trace operators that there are kernels for.

    It keeps the operators in `_DECOMPOSED` and their gradients whole, and traces the functions in `_INTO_KERNELS` and
    `more` instead of theirs.
    """
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    packets = [getattr(torch.ops.aten, name) for name in _DECOMPOSED]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    functions = {**_INTO_KERNELS, **more}
    overloads += functions
    kernels = {overload: dict(overload.py_kernels) for overload in overloads}
    try:
        for overload in overloads:
            for key in keys:
                overload.py_kernels.pop(key, None)
            overload._dispatch_cache.clear()
        for overload, function in functions.items():
            is_composite = overload.has_kernel_for_dispatch_key(keys[1])
            overload.py_kernels[keys[is_composite]] = function
        yield
    finally:
        for overload, own in kernels.items():
            overload.py_kernels.clear()
            overload.py_kernels.update(own)
            overload._dispatch_cache.clear()


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    others = [each for each in range(v.dim()) if dim == -1 or each != dim % v.dim()]
    return v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=True))


class _Prelu(torch.autograd.Function):
    """PReLU, with one pass over x and the gradient for each of its gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.where(x > 0, x, weight * x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        dw = torch.where(x > 0, 0, gradient * x).sum_to_size(weight.shape)
        return torch.where(x > 0, gradient, weight * gradient), dw


class _Amax(torch.autograd.Function):
    """Maximum, whose gradient PyTorch computes with a count of bools in int64."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> torch.Tensor:
        return _extreme(ctx, torch.amax, x, dim, keepdim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, y = ctx.saved_tensors
        is_largest = x == y
        count = torch.where(is_largest, 1.0, 0.0).to(x.dtype).sum(ctx.dims, keepdim=True)
        return torch.where(is_largest, gradients[0].reshape(y.shape) / count, 0), None, None


class _Amin(_Amax):
    """Minimum, likewise."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> torch.Tensor:
        return _extreme(ctx, torch.amin, x, dim, keepdim)


def _extreme(
    ctx: Any, reduce: Callable[..., torch.Tensor], x: torch.Tensor, dim: Sequence[int], keepdim: bool
) -> torch.Tensor:
    dims = [one % x.dim() for one in dim] or list(range(x.dim()))
    with torch._C._AutoDispatchBelowAutograd():  # PyTorch's own
        y = reduce(x, dims, keepdim=True)
    ctx.save_for_backward(x, y)
    ctx.dims = dims
    return y if keepdim else y.squeeze(dims)


def _selected_gradient(
    gradient: torch.Tensor, dim: int, indices: torch.Tensor, sizes: Sequence[int], keepdim: bool
) -> torch.Tensor:
    """Return the gradient of one element of each row, as of `max` along a dimension, without a scatter into zeros."""
    if not sizes:
        return gradient
    if not keepdim:
        gradient, indices = gradient.unsqueeze(dim), indices.unsqueeze(dim)
    if indices.shape[dim] != 1 or sizes[dim] >= _FP32_INTEGERS:  # several elements, as of topk
        return gradient.new_zeros(sizes).scatter(dim, indices, gradient)
    places = torch.arange(sizes[dim], dtype=torch.float32, device=indices.device)
    others = [1] * len(sizes)
    others[dim] = sizes[dim]
    return torch.where(places.reshape(others) == indices.to(torch.float32), gradient, 0)


class _PadCircular(torch.autograd.Function):
    """Circular padding, which PyTorch writes as copies into slices of an empty tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pad: Sequence[int]) -> torch.Tensor:
        ctx.pad = pad
        for dim, before, after in _padded_dims(pad):
            size = x.shape[dim]
            edges = x.narrow(dim, size - before, before), x, x.narrow(dim, 0, after)
            x = torch.cat([edge for edge in edges if edge.shape[dim]], dim)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (dx,) = gradients
        for dim, before, after in _padded_dims(ctx.pad):
            left, dx, right = dx.split([before, dx.shape[dim] - before - after, after], dim)
            dx = _with_edges(dx, right, left, dim)
        return dx, None


def _with_edges(x: torch.Tensor, first: torch.Tensor, last: torch.Tensor, dim: int) -> torch.Tensor:
    """Add values to the first and to the last elements of x along a dimension."""
    size, ahead, behind = x.shape[dim], first.shape[dim], last.shape[dim]
    if ahead + behind > size:  # one after the other
        return _with_edges(
            _with_edges(x, first, last.narrow(dim, 0, 0), dim), first.narrow(dim, 0, 0), last, dim
        )
    parts = [x.narrow(dim, ahead, size - ahead - behind)]
    if ahead:
        parts.insert(0, x.narrow(dim, 0, ahead) + first)
    if behind:
        parts.append(x.narrow(dim, size - behind, behind) + last)
    return torch.cat([part for part in parts if part.shape[dim]], dim)


def _padded_dims(pad: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return dimensions, counted from the last one, with the elements before and after."""
    sides = zip(pad[::2], pad[1::2], strict=True)
    return [(-1 - n, before, after) for n, (before, after) in enumerate(sides) if before or after]


def _glu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    values, gates = x.chunk(2, dim)
    return values * torch.sigmoid(gates)


def _log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return -torch.nn.functional.softplus(-x)


def _on_frames(
    x: torch.Tensor,
    on_frames: Callable[[torch.Tensor], torch.Tensor],
    on_rows: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Apply a function of images to the frames of volumes, then one along frames, each of which is a row."""
    volumes = x if x.dim() == _VOLUME_RANK else x.unsqueeze(0)
    frames = on_frames(volumes.transpose(1, 2).flatten(0, 1))
    height, width = frames.shape[2:]
    rows = frames.unflatten(0, (volumes.shape[0], -1)).transpose(1, 2).flatten(3)
    result = on_rows(rows).unflatten(3, (height, width))
    return result if x.dim() == _VOLUME_RANK else result.squeeze(0)


def _max_pool3d(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> torch.Tensor:
    """Pool frames, then along them: of equal elements the first is the largest either way."""
    (kernel, *sides), (step, *steps) = _triple(kernel_size), _triple(stride or kernel_size)
    (pad, *pads), (apart, *others) = _triple(padding), _triple(dilation)
    pool = torch.nn.functional.max_pool2d
    return _on_frames(
        x,
        lambda frames: pool(frames, sides, steps, pads, others, ceil_mode),
        lambda rows: pool(rows, (kernel, 1), (step, 1), (pad, 0), (apart, 1), ceil_mode),
    )


def _avg_pool3d(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    (kernel, *sides), (step, *steps) = _triple(kernel_size), _triple(stride or kernel_size)
    pad, *pads = _triple(padding)
    pool, rest = torch.nn.functional.avg_pool2d, (ceil_mode, count_include_pad)
    if x.dim() == _VOLUME_RANK and x.shape[1] == 1 and {*sides, *steps} == {1} and not any(pads):
        # Windows over channels, as of local response normalization, slide along rows of [N, H, W, C].
        images = x.squeeze(1).movedim(1, -1)
        rows = pool(images, (1, kernel), (1, step), (0, pad), *rest, divisor_override)
        return rows.movedim(-1, 1).unsqueeze(1)
    one = None if divisor_override is None else 1
    return _on_frames(
        x,
        lambda frames: pool(frames, sides, steps, pads, *rest, one),
        lambda rows: pool(rows, (kernel, 1), (step, 1), (pad, 0), *rest, divisor_override),
    )


def _upsample3d(resize: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the resizing of volumes by that of images."""

    def upsample(x: torch.Tensor, output_size: Sequence[int] | None, *rest: Any) -> torch.Tensor:
        *corners, scales = rest
        if output_size is not None:
            depth, *sides = output_size
            return _on_frames(
                x,
                lambda frames: resize(frames, sides, *corners, None),
                lambda rows: resize(rows, (depth, rows.shape[3]), *corners, None),
            )
        return _on_frames(
            x,
            lambda frames: resize(frames, None, *corners, scales[1:]),
            lambda rows: resize(rows, None, *corners, (scales[0], 1.0)),
        )

    return upsample


def _triple(value: Sequence[int]) -> tuple[int, ...]:
    return tuple(value) if len(value) == 3 else tuple(value) * 3


_FP32_INTEGERS = 2**24
"""fp32 represents all integers up to this one."""
# Their gradients are then of operators that there are kernels for.
_INTO_KERNELS: Functions = {
    torch.ops.aten._weight_norm.default: _weight_norm,
    torch.ops.aten._prelu_kernel.default: _Prelu.apply,
    torch.ops.aten.amax.default: _Amax.apply,
    torch.ops.aten.amin.default: _Amin.apply,
    torch.ops.aten.max.default: _Amax.apply,
    torch.ops.aten.min.default: _Amin.apply,
    torch.ops.aten.value_selecting_reduction_backward.default: _selected_gradient,
    torch.ops.aten._pad_circular.default: _PadCircular.apply,
    torch.ops.aten.glu.default: _glu,
    torch.ops.aten.log_sigmoid.default: _log_sigmoid,
    torch.ops.aten.max_pool3d.default: _max_pool3d,
    torch.ops.aten.avg_pool3d.default: _avg_pool3d,
    torch.ops.aten.upsample_nearest3d.vec: _upsample3d(torch.ops.aten.upsample_nearest2d.vec),
    torch.ops.aten._upsample_nearest_exact3d.vec: _upsample3d(torch.ops.aten._upsample_nearest_exact2d.vec),
    torch.ops.aten.upsample_trilinear3d.vec: _upsample3d(torch.ops.aten.upsample_bilinear2d.vec),
    torch.ops.aten.ctc_loss.Tensor: ctc_loss_in_step,
    torch.ops.aten.ctc_loss.IntList: ctc_loss_in_step,
}


@dataclass(frozen=True)
class PassedThrough:
    """A result that is the input with this index."""

    index: int


@dataclass(frozen=True)
class GraphResult:
    """A result that is the graph's output with this index."""

    index: int


@dataclass(frozen=True)
class AotGraph:
    """A graph for inputs of fixed shapes, and the module's results, built from the graph's outputs."""

    graph: Graph
    results: tuple[PassedThrough | GraphResult | int | float | bool | None, ...]
    layouts: dict[str, str]
    """Layout in PyTorch of each 4-D output."""


class _ShapeInterpreter(torch.fx.Interpreter):
    """Re-runs a module on fake tensors so that node metadata has numbers for symbolic sizes."""

    def run_node(self, n: torch.fx.Node) -> Any:
        n.meta["val"] = super().run_node(n)
        return n.meta["val"]


def capture_aot_graph(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> AotGraph:
    """Capture a module of AOTAutograd for inputs of the same shapes and the same numbers as these."""
    module_copy = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [
        mode.from_tensor(value.detach(), static_shapes=True) if isinstance(value, torch.Tensor) else value
        for value in inputs
    ]
    with torch.no_grad(), mode:
        _ShapeInterpreter(module_copy).run(*fakes)
    reader = FunctionalReader(module_copy, "this part of the model")
    placeholders = {node: index for index, node in enumerate(module_copy.graph.find_nodes(op="placeholder"))}
    graph = reader.read([f"input_{index}" for index in placeholders.values()], [""] * len(placeholders))
    outputs: dict[torch.fx.Node, int] = {}
    results: list[PassedThrough | GraphResult | int | float | bool | None] = []
    for result in reader.results:
        value = result.meta.get("val") if isinstance(result, torch.fx.Node) else result
        if value is None or isinstance(value, int | float):
            results.append(value)
        elif not isinstance(value, torch.Tensor):
            raise CaptureError(f"a part of the model returns {type(value).__name__}; a plan returns tensors")
        elif result in placeholders:
            results.append(PassedThrough(placeholders[result]))
        else:
            results.append(GraphResult(outputs.setdefault(result, len(outputs))))
    reader.set_outputs(graph, list(outputs))
    layouts = {
        output: InputFormat.of(node.meta["val"]).layout
        for output, node in zip(graph.outputs, outputs, strict=True)
        if node.meta["val"].dim() == 4
    }
    return AotGraph(graph, tuple(results), layouts)
