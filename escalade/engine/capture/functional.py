"""Reads what AOTAutograd gives, functional graphs of PyTorch's operators whose sizes are numbers, into typed graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from escalade.engine.capture.reader import CaptureError, FxReader
from escalade.engine.graph.graph import Graph, Node

_EMPTY_CALLS = ("aten::_assert_tensor_metadata", "aten::_assert_async.msg", "aten::_assert_scalar")
"""Calls that say something of values and change nothing."""
_DECOMPOSED = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_trilinear3d", "upsample_bicubic2d", "multilabel_margin_loss_forward",
)  # fmt: skip
"""Operators of one kernel each that AOTAutograd would take apart: upsampling into gathers and scatters of single
elements, the loss of several labels into what counts labels behind the last one too."""


class FunctionalReader(FxReader):
    """A module of AOTAutograd's, node by node."""

    def __init__(self, module: torch.fx.GraphModule, title: str) -> None:
        super().__init__()
        for node in module.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target.name() in _EMPTY_CALLS:
                module.graph.erase_node(node)
        _say_by_sizes(module.graph)
        module.graph.eliminate_dead_code()
        self._module = module
        self._title = title
        self.held: list[torch.Tensor] = []
        """Tensors with contents that the module holds; the graph has copies of them."""
        self._sources: dict[torch.fx.Node, str] = {}
        """The modules that parameters belong to, and with them what is computed of these."""

    def read(self, names: Sequence[str], sources: Sequence[str]) -> Graph:
        """A graph with inputs of these names, of tensors that belong to these modules; it has no outputs yet."""
        graph = Graph((), {}, {}, (), typed=True)
        nodes = self._module.graph.nodes
        given = [node for node in nodes if node.op == "placeholder"]
        self._sources.update(zip(given, sources, strict=True))
        named = zip(given, names, strict=True)
        tensors = [pair for pair in named if isinstance(pair[0].meta.get("val"), torch.Tensor)]
        self._take(graph, [node for node, _ in tensors], [name for _, name in tensors])
        for node in nodes:
            if node.op == "call_function":
                self._call(graph, node)
            elif node.op == "get_attr":
                self._constant(graph, node)
        return graph

    @property
    def results(self) -> list[Any]:
        """What the module returns: nodes, numbers, None."""
        return list(next(node for node in self._module.graph.nodes if node.op == "output").args[0])

    def returning(self, graph: Graph, results: Sequence[torch.fx.Node]) -> None:
        """Has the graph return these."""
        graph.outputs = tuple(map(self._value, results))
        graph.output_types = tuple(str(one.meta["val"].dtype).removeprefix("torch.") for one in results)
        graph.remove_dead_code()

    def _constant(self, graph: Graph, node: torch.fx.Node) -> None:
        tensor = getattr(self._module, str(node.target), None)
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor):
            raise CaptureError(
                f"{self._title} has a branch or loop inside ({node.target}); a plan runs the same operations every time"
            )
        self.held.append(tensor)
        self._values[node] = graph.add_constant(str(node.target), tensor.detach().clone())

    def _node(self, graph: Graph, fx: torch.fx.Node, call: torch.fx.Node, *rest: Any) -> Node:
        """PyTorch keeps a batch's statistics in the type of BatchNorm's weights, which its tensors without contents do
        not say."""
        node = super()._node(graph, fx, call, *rest)
        if call.target is torch.ops.aten._native_batch_norm_legit_functional.default and fx.args[1] in (1, 2):
            others = [graph.dtype_of(name) for role, name in node.inputs.items() if role != "in0"]
            wide = next((dtype for dtype in others if dtype.itemsize > 2), None)
            node = node if wide is None else replace(node, dtype=str(wide).removeprefix("torch."))
        return node

    def _source(self, call: torch.fx.Node) -> str:
        """The module whose parameters it is computed with."""
        found = {self._sources.get(one, "") for one in call.all_input_nodes} - {""}
        source = found.pop() if len(found) == 1 else ""
        if call.target is torch.ops.aten._to_copy.default:
            self._sources[call] = source
        return source


def _say_by_sizes(graph: torch.fx.Graph) -> None:
    """Views by strides that are nothing but other sizes become such."""
    for node in list(graph.nodes):
        given = _reshaped(node)
        if given is None:
            continue
        with graph.inserting_before(node):
            view = graph.call_function(torch.ops.aten.reshape.default, (given, list(node.meta["val"].shape)))
        view.meta = dict(node.meta)
        node.replace_all_uses_with(view)
        graph.erase_node(node)


def _reshaped(node: torch.fx.Node) -> torch.fx.Node | None:
    """What a call gives with other sizes, if it is a view by strides of all of a dense tensor, or writes over all of
    one by strides."""
    takes = node.target is torch.ops.aten.as_strided.default
    if not takes and node.target is not torch.ops.aten.as_strided_scatter.default:
        return None
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    bound: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    whole, part = bound["self"].meta["val"], node.meta["val"] if takes else bound["src"].meta["val"]
    if whole.numel() != part.numel() or bound.get("storage_offset") or whole.storage_offset():
        return None
    for sizes, strides in ((bound["size"], bound["stride"]), (whole.shape, whole.stride())):
        if not _same_strides(sizes, strides, torch.empty(tuple(sizes), device="meta").stride()):
            return None
    found: torch.fx.Node = bound["self"] if takes else bound["src"]
    return found


def _same_strides(sizes: Any, first: Any, second: Any) -> bool:
    """Whether strides are the same where it matters."""
    return all(size <= 1 or a == b for size, a, b in zip(sizes, first, second, strict=True))


@contextmanager
def operators_whole() -> Iterator[None]:
    """AOTAutograd keeps these as the operators that they are, and their gradients so too."""
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    packets = [getattr(torch.ops.aten, name) for name in _DECOMPOSED]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    taken: list[tuple[Any, Any, Any]] = []
    try:
        for overload in overloads:
            for key in keys:
                if key in overload.py_kernels:
                    taken.append((overload, key, overload.py_kernels.pop(key)))
            overload._dispatch_cache.clear()
        yield
    finally:
        for overload, key, kernel in taken:
            overload.py_kernels[key] = kernel
        for overload in overloads:
            overload._dispatch_cache.clear()
