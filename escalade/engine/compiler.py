"""Makes an engine of a PyTorch model, or of a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from escalade.device.precompilation import warm_up_compilers
from escalade.device.strides import empty, layout_of
from escalade.engine.capture.any_size import AnySize
from escalade.engine.capture.example_inputs import ExampleInputs, has_batch_dimension, require_module
from escalade.engine.engine import Engine
from escalade.engine.file import reading
from escalade.engine.graph.forms import require_dtype
from escalade.engine.graph.graph import Batch, Graph
from escalade.engine.network import Shapes
from escalade.engine.nodes.arithmetic import own_arithmetic
from escalade.engine.nodes.normalise import Normalise
from escalade.engine.passes import fuse
from escalade.engine.passes.calibrate import ranges, transfer_ranges
from escalade.engine.programs import example_of, module_of, read_program
from escalade.engine.settings import MOST_PLANS, TWIN, require_device
from escalade.errors import OutOfMemory, UnsupportedError
from escalade.gc_pause import gc_paused

Normalization = tuple[Sequence[float], Sequence[float]]


def compile(
    model: torch.nn.Module | torch.export.ExportedProgram | str | os.PathLike[str],
    example_inputs: torch.Tensor | Sequence[Any] | None = None,
    example_keywords: Mapping[str, Any] | None = None,
    *,
    dtype: str | torch.dtype = "fp32",
    device: torch.device | str | None = None,
    normalize: Normalization | None = None,
    calibration: Iterable[Any] | None = None,
    plans: int = MOST_PLANS,
    measured: bool = False,
    buffers: int = 1,
    memory: str | int | None = None,
    sizes: Iterable[tuple[int, int]] = (),
    batches: Iterable[int] = (),
    deterministic: bool = False,
) -> Engine:
    """An engine that computes what the model does in evaluation mode, for inputs like these of any batch and image size
    that the model takes.

    A program of `torch.export`, or its .pt2 file, is taken as a model is, and brings its example inputs.

    `dtype` is fp32 (fp32's accuracy), tf32, fp16, bf16 or fp8 (which takes `calibration`, batches to measure value
    ranges on, and is slower than fp16 today); torch.float16 and the like are the same. Arguments that are no tensors
    are constants: numbers, texts, True, None. `device` is where it runs: the model's own device if not given; "cpu"
    runs PyTorch's operators, "twin" the kernels themselves on the CPU. With `normalize=(mean, std)` inputs are images
    of 0 to 255, uint8 or not, and (x / 255 - mean) / std happens on the way in. `plans` is how many sizes are kept
    ready. With `measured`, on a GPU, the steps of every plan are timed beside PyTorch's operators when it is made,
    which takes seconds; the faster is kept for each, and remembered for the card. With several `buffers`, calls on
    different streams overlap: so many at a time, each with memory of its own for what lies between its kernels. Plans
    go, those not used for longest first, when all together would take more than `memory` ("2GiB") for values and packed
    weights. Plans for images of all `sizes`, rows and columns, in all `batches` are made ahead; without them, one for
    the example. With `deterministic`, an item's result is the same, bit for bit, in every batch and at every run: all
    batches are computed in pieces of the example's batch size, the last one filled up.
    """
    dtype = require_dtype(dtype)
    sizes, batches = _images_of(sizes), _counts_of(batches)
    if isinstance(model, str | os.PathLike):
        model = read_program(model)
    if isinstance(model, torch.export.ExportedProgram):
        if example_inputs is None:
            example_inputs, example_keywords = example_of(model)
        model = module_of(model)
    require_module(model)
    if example_inputs is None:
        raise UnsupportedError(
            "compile needs example inputs: tensors like those the model will be called with"
        )
    if any(isinstance(module, Engine) for module in model.modules()):
        raise UnsupportedError(
            "the model is an engine, or has one inside: compile takes the PyTorch model that it was made of"
        )
    if calibration is not None and dtype != "fp8":
        raise UnsupportedError(f"calibration is for dtype fp8; {dtype} needs none")
    if calibration is None and dtype == "fp8":
        raise UnsupportedError(
            "dtype fp8 needs calibration=batches, a few batches of inputs that look like the data to come: the ranges "
            "of the network's values are measured on them"
        )
    inputs = _arguments(example_inputs)
    given = ExampleInputs.of(inputs, example_keywords)
    tensors = given.tensors
    where = _device(model, tensors, device)
    if _home(where).type == "cuda":
        warm_up_compilers()
    examples = _beside(model, tensors if normalize is None else _floats(tensors))
    captured = AnySize(model, *given.call(examples))
    graphs = _Graphs(captured, normalize, _home(where))
    graph = graphs.prepared(captured.graph)
    if calibration is not None:
        graphs.calibrate(graph, calibration)
    engine = Engine(
        graph,
        dtype,
        where,
        plans,
        measured=measured,
        buffers=buffers,
        others=graphs.graph_for,
        memory=memory,
        pieces=_batch_of(graph, tensors) if deterministic else None,
    )
    engine.prepare(_in_sizes(graph, [tensor.to(engine.device) for tensor in tensors], sizes, batches))
    return engine


def _in_sizes(
    graph: Graph, tensors: Sequence[torch.Tensor], sizes: Sequence[tuple[int, int]], batches: Sequence[int]
) -> list[list[torch.Tensor]]:
    """Inputs like the example's for images of every size in every batch."""
    images = {tuple(tensor.shape[2:]) for tensor in tensors if tensor.dim() == 4}
    if sizes and len(images) != 1:
        raise UnsupportedError(
            f"sizes is for models whose images are all of one size; this one's example has {len(images)} sizes"
        )

    lists = {
        id(tensor) for given, tensor in zip(graph.inputs, tensors, strict=True) if given.shape == (Batch(),)
    }

    def made(tensor: torch.Tensor, size: tuple[int, int] | None, batch: int | None) -> torch.Tensor:
        shape = [*tensor.shape]
        if batch is not None and (has_batch_dimension(tensor) or id(tensor) in lists):
            shape[0] = batch
        if size is not None and tensor.dim() == 4:
            shape[2:] = size
        if shape == [*tensor.shape]:
            return tensor
        try:
            return empty(shape, tensor.dtype, layout_of(tensor), tensor.device).zero_()
        except RuntimeError as error:
            raise OutOfMemory(
                f"there is no memory for an input of {tuple(shape)}, which sizes and batches ask for"
            ) from error

    return [
        [made(tensor, size, batch) for tensor in tensors]
        for size in (sizes or (None,))
        for batch in (batches or (None,))
    ]


def _batch_of(graph: Graph, tensors: Sequence[torch.Tensor]) -> int:
    """The batch of example inputs; 1 if the model has none."""
    for given, tensor in zip(graph.inputs, tensors, strict=True):
        if given.shape and isinstance(first := given.shape[0], Batch):
            return tensor.shape[0] // first.times
    return 1


def _images_of(sizes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The sizes that were asked for, each rows and columns."""
    if isinstance(sizes, str | bytes | Mapping) or not isinstance(sizes, Iterable):
        raise UnsupportedError(
            f"sizes={sizes!r}: it is a list of rows and columns, as [(224, 224), (256, 320)]"
        )
    found = list(sizes)
    for size in found:
        if not (isinstance(size, tuple | list) and len(size) == 2 and all(map(_is_count, size))):
            raise UnsupportedError(f"sizes has {size!r}; each is a pair of rows and columns, as (224, 224)")
    return found


def _counts_of(batches: Iterable[int]) -> list[int]:
    """The batch sizes that were asked for."""
    if isinstance(batches, str | bytes | Mapping) or not isinstance(batches, Iterable):
        raise UnsupportedError(f"batches={batches!r}: it is a list of numbers of items, as [1, 8, 32]")
    found = list(batches)
    for batch in found:
        if not _is_count(batch):
            raise UnsupportedError(f"batches has {batch!r}; each is a number of items, at least 1")
    return found


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class _Graphs:
    """Graphs for whatever sizes come, as they were asked for."""

    def __init__(self, captured: AnySize, normalize: Normalization | None, home: torch.device) -> None:
        self._captured, self._normalize, self._home = captured, normalize, home
        self._fused: Graph | None = None

    def graph_for(self, shapes: Shapes) -> Graph:
        graph = self.prepared(self._captured.graph_for(shapes))
        if self._fused is not None:
            graph.ranges = transfer_ranges(self._fused, self._fuse(graph))
        return graph

    def prepared(self, graph: Graph) -> Graph:
        """The graph with what was asked for in front of it."""
        if self._normalize is not None:
            _normalise(graph, self._normalize)
        return graph

    def calibrate(self, graph: Graph, batches: Iterable[Any]) -> None:
        """Measures the ranges of values in the first graph; those for other sizes have the same."""
        fused = self._fuse(graph)
        graph.ranges = ranges(fused, batches, self._home)
        self._fused = replace(fused, ranges=graph.ranges)

    def _fuse(self, graph: Graph) -> Graph:
        with own_arithmetic("fp32", self._home):
            return fuse(graph, "fp8")


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    plans: int = MOST_PLANS,
    measured: bool = False,
    kernels: bool = True,
    buffers: int = 1,
    memory: str | int | None = None,
    pieces: int | None = None,
) -> Engine:
    """The engine of a file; on the GPU if there is one, unless a device is named ("cpu", "twin", "cuda:1").

    `measured`, `buffers` and `memory` are as for `compile`. Plans and machine code that the file has for this GPU are
    taken as they are, and need no compiler; without `kernels` they are left aside, as for files from strangers they
    should be. With `pieces`, a batch size, the engine is deterministic: all batches are computed in pieces of it.
    """
    where = device if device is not None else ("cuda" if torch.cuda.is_available() else "cpu")
    require_device(where)
    with gc_paused(), reading(path, _home(where)) as (graph, dtype, carried):
        engine = Engine(
            graph, dtype, where, plans, measured=measured, buffers=buffers, memory=memory, pieces=pieces
        )
        if kernels:
            engine.take(carried, str(path))
    return engine


def _arguments(given: torch.Tensor | Sequence[Any]) -> tuple[Any, ...]:
    """What the model is to be called with."""
    if isinstance(given, torch.Tensor):
        return (given,)
    if isinstance(given, tuple | list):
        return tuple(given)
    raise UnsupportedError(
        f"the example inputs are of type {type(given).__name__}; compile takes a tensor like those that the model "
        "will be called with, or a tuple of its arguments, and those by name as example_keywords"
    )


def _home(where: torch.device | str) -> torch.device:
    """The device that an engine's tensors are on."""
    return torch.device("cpu" if where == TWIN else where)


def _device(
    model: torch.nn.Module, inputs: Sequence[torch.Tensor], device: torch.device | str | None
) -> torch.device | str:
    if device is not None:
        require_device(device)
        return device
    return next(tensor.device for tensor in (*model.parameters(), *model.buffers(), *inputs))


def _beside(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs on the model's device: it is captured there, wherever the engine will run."""
    home = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
    return [tensor if home is None else tensor.to(home) for tensor in inputs]


def _floats(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Images of bytes are captured as what the model takes: floats."""
    return [tensor.float() if tensor.dtype == torch.uint8 else tensor for tensor in inputs]


def _normalise(graph: Graph, normalize: Normalization) -> None:
    """A node in front of everything that reads the image."""
    images = [given for given in graph.inputs if len(given.shape) == 4]
    if len(images) != 1:
        raise UnsupportedError(f"normalize is for models with one image input; this one has {len(images)}")
    image = images[0]
    refusal = UnsupportedError(
        f"normalize takes (mean, std): {image.shape[1]} means and as many positive standard deviations, one for each "
        "channel"
    )
    try:
        mean, std = (torch.tensor(list(values), dtype=torch.float64, device="cpu") for values in normalize)
    except (TypeError, ValueError, RuntimeError) as error:
        raise refusal from error
    finite = bool(torch.isfinite(mean).all() and torch.isfinite(std).all())
    if mean.shape != (image.shape[1],) or std.shape != mean.shape or not finite or not bool((std > 0).all()):
        raise refusal
    name = graph.fresh("normalise")
    scale = graph.add_constant("normalise_scale", (1 / (255 * std)).float())
    shift = graph.add_constant("normalise_shift", (-mean / std).float())
    inputs = {"x": image.name, "scale": scale, "shift": shift}
    placed = Normalise.node(name, inputs, {}, image.shape, image.dtype)
    graph.replace_uses(image.name, name)
    first = next(iter(graph.nodes), None)
    if first is None:
        graph.append(placed)
    else:
        graph.insert_before(first, placed)
