"""Build an engine from a PyTorch model or from a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from escalade.device.precompilation import warm_up_compilers
from escalade.device.strides import empty, layout_of
from escalade.engine.calibration import Calibration, require_carried_ranges
from escalade.engine.capture.example_inputs import ExampleInputs, has_batch_dimension, require_module
from escalade.engine.capture.export import AnySize
from escalade.engine.engine import Engine
from escalade.engine.file import reading
from escalade.engine.graph.forms import require_dtype
from escalade.engine.graph.graph import Batch, Graph
from escalade.engine.networks import Shapes
from escalade.engine.nodes.convert import Normalize
from escalade.engine.nodes.evaluate import own_arithmetic
from escalade.engine.passes import optimize
from escalade.engine.passes.calibrate import transfer_ranges
from escalade.engine.programs import ModelFile, module_of, of_program, read_model
from escalade.engine.settings import DEFAULT_PLANS, TWIN, require_device
from escalade.engine.weight_update import SourceModel
from escalade.errors import OutOfMemory, UnsupportedError
from escalade.gc_pause import gc_paused
from escalade.ops.base.dtypes import QUANTIZED
from escalade.terminal_text import counted

Normalization = tuple[Sequence[float], Sequence[float]]


def compile(
    model: torch.nn.Module | torch.export.ExportedProgram | str | os.PathLike[str],
    example_inputs: torch.Tensor | Sequence[Any] | None = None,
    example_keywords: Mapping[str, Any] | None = None,
    *,
    dtype: str | torch.dtype = "fp32",
    device: torch.device | str | None = None,
    normalize: Normalization | None = None,
    calibration: Iterable[Any] | str | os.PathLike[str] | None = None,
    calibration_method: str = "max",
    keep: Mapping[str, Iterable[str]] | None = None,
    accuracy: float | None = None,
    bias_correction: bool = False,
    progress: bool = False,
    plans: int = DEFAULT_PLANS,
    measured: bool = False,
    buffers: int = 1,
    memory: str | int | None = None,
    sizes: Iterable[tuple[int, int]] = (),
    batches: Iterable[int] = (),
    deterministic: bool = False,
) -> Engine:
    """Compile a model for inference, for inputs like the examples in any batch and image size that the model takes.

    The engine computes what the model computes in evaluation mode. The model itself is never run or changed. The engine
    has a copy of its weights, so training or changing the model later does not change the engine: call
    `engine.refresh()` to copy the weights again, or `engine.load_state_dict(state)` to replace them.

    Args:
        model: A PyTorch model, a program of `torch.export`, or a path: a .pt2 file of `torch.export`, an .onnx file
            (needs `escalade[onnx]`), or a folder with config.json and weights of timm or transformers. Programs, files
            and folders have example inputs of their own.
        example_inputs: A tensor, or a sequence of positional arguments, like those of later calls. Arguments that are
            not tensors (numbers, strings, True, None) become constants.
        example_keywords: Keyword arguments like those of later calls.
        dtype: fp32 (full fp32 accuracy), tf32, fp16, bf16, int8 or fp8, or PyTorch's names such as torch.float16. int8
            and fp8 need `calibration`, unless the model quantizes its values itself.
        device: Where the engine runs; default is the model's device. "cpu" runs PyTorch's operators, "twin" runs the
            kernels themselves on the CPU.
        normalize: (mean, std). Inputs are then images with values 0 to 255, in uint8 or floating point, and the engine
            computes (x / 255 - mean) / std first.
        calibration: Batches to measure value ranges on, for int8 and fp8; or a file that `engine.save_ranges` wrote.
        calibration_method: How a range follows from what was measured: "max" (the largest magnitude), "percentile" (of
            99.99% of the elements), "mse" (the least mean squared error) or "entropy" (the least Kullback-Leibler
            divergence). See `engine.calibration_report()`.
        keep: Layers that are not quantized, such as {"fp16": ["conv1", "layer4"]}; a name includes its submodules.
        accuracy: Least agreement with fp32 on the calibration batches, such as 0.99; the layers that cost the most
            accuracy then stay in 16 bits, too. For a classifier it is the share of equal classes, for other results
            one less their relative error.
        bias_correction: Subtract from biases the mean error that rounding the weights causes in calibration.
        progress: Show a progress bar for calibration on stderr.
        plans: Number of input sizes that stay planned at a time.
        measured: Time each step of a new plan against PyTorch's operators, use the faster, and remember it for the
            card. Needs a GPU and takes seconds.
        buffers: Number of calls of one plan that can overlap on different streams. Each has buffers of its own.
        memory: Limit for the values and packed weights of all plans, such as "2GiB"; least recently used plans are
            dropped first.
        sizes: Image sizes (rows, columns) to plan ahead; default is the example's.
        batches: Batch sizes to plan ahead, each with every one of `sizes`; default is the example's.
        deterministic: Make each item's result bitwise identical in every batch and at every run. Every call is split
            into batches of the example's size, the last one padded.

    Returns:
        An engine, called like the model.

    Raises:
        UnsupportedError: The model cannot be captured, or an argument is not supported.
        OutOfMemory: The plan needs more memory than `memory`, or than the device has.
    """
    dtype = require_dtype(dtype)
    sizes = _checked_list(
        "sizes", sizes, "(rows, columns), as [(224, 224), (256, 320)]",
        "a pair of rows and columns, as (224, 224)", _is_size,
    )  # fmt: skip
    batches = _checked_list(
        "batches", batches, "batch sizes, as [1, 8, 32]", "a whole number of at least 1", _is_count
    )
    if isinstance(model, str | os.PathLike):
        model, example_inputs, example_keywords = _with_example(
            read_model(model), example_inputs, example_keywords
        )
    if isinstance(model, torch.export.ExportedProgram):
        _, example_inputs, example_keywords = _with_example(
            of_program(model), example_inputs, example_keywords
        )
        model = module_of(model)
    require_module(model)
    if example_inputs is None:
        raise UnsupportedError(
            "compile needs example inputs: tensors like those the model will be called with"
        )
    if any(isinstance(module, Engine) for module in model.modules()):
        raise UnsupportedError(
            "the model is an engine or contains one; compile the PyTorch model that the engine was built from"
        )
    options = Calibration(calibration, calibration_method, keep or {}, accuracy, bias_correction, progress)
    options.check(dtype)
    inputs = _as_arguments(example_inputs)
    example = ExampleInputs.of(inputs, example_keywords)
    tensors = example.tensors
    where = _device(model, tensors, device)
    if _tensor_device(where).type == "cuda":
        warm_up_compilers()
    examples = _on_model_device(model, tensors if normalize is None else _as_floats(tensors))
    captured = AnySize(model, *example.call(examples))
    graphs = _GraphProvider(captured, dtype, normalize, _tensor_device(where))
    graph = graphs.prepared(captured.graph)
    if calibration is not None:
        graphs.calibrate(graph, options)
    elif dtype in QUANTIZED:
        require_carried_ranges(graph, dtype)
    engine = Engine(
        graph,
        dtype,
        where,
        plans,
        measured=measured,
        buffers=buffers,
        graph_provider=graphs.graph_for,
        memory=memory,
        fixed_batch=_batch_of(graph, tensors) if deterministic else None,
        source=SourceModel(model, captured),
    )
    engine.prepare(
        _example_inputs_for(graph, [tensor.to(engine.device) for tensor in tensors], sizes, batches)
    )
    return engine


def _with_example(
    file: ModelFile, inputs: torch.Tensor | Sequence[Any] | None, keywords: Mapping[str, Any] | None
) -> tuple[
    torch.nn.Module | torch.export.ExportedProgram,
    torch.Tensor | Sequence[Any],
    Mapping[str, Any] | None,
]:
    """Return the model of a file with the caller's example inputs; with its own if there are none."""
    if inputs is None:
        return file.model, file.require_arguments(), file.keywords
    return file.model, inputs, keywords


def _example_inputs_for(
    graph: Graph, tensors: Sequence[torch.Tensor], sizes: Sequence[tuple[int, int]], batches: Sequence[int]
) -> list[list[torch.Tensor]]:
    """Return inputs like the example's for every combination of image size and batch size."""
    images = {tuple(tensor.shape[2:]) for tensor in tensors if tensor.dim() == 4}
    if sizes and len(images) != 1:
        raise UnsupportedError(
            f"sizes needs a model whose input images all have one size; the example has {counted(len(images), 'size')}"
        )

    vectors = {
        id(tensor) for entry, tensor in zip(graph.inputs, tensors, strict=True) if entry.shape == (Batch(),)
    }

    def resized(tensor: torch.Tensor, size: tuple[int, int] | None, batch: int | None) -> torch.Tensor:
        shape = [*tensor.shape]
        if batch is not None and (has_batch_dimension(tensor) or id(tensor) in vectors):
            shape[0] = batch
        if size is not None and tensor.dim() == 4:
            shape[2:] = size
        if shape == [*tensor.shape]:
            return tensor
        try:
            return empty(shape, tensor.dtype, layout_of(tensor), tensor.device).zero_()
        except RuntimeError as error:
            raise OutOfMemory(
                f"not enough memory for an input of shape {tuple(shape)}; pass smaller sizes or batches"
            ) from error

    return [
        [resized(tensor, size, batch) for tensor in tensors]
        for size in (sizes or (None,))
        for batch in (batches or (None,))
    ]


def _batch_of(graph: Graph, tensors: Sequence[torch.Tensor]) -> int:
    """Return the batch size of the example inputs; 1 if no input is batched."""
    for entry, tensor in zip(graph.inputs, tensors, strict=True):
        if entry.shape and isinstance(first := entry.shape[0], Batch):
            return tensor.shape[0] // first.times
    return 1


def _checked_list(
    name: str, values: Iterable[Any], wanted: str, each: str, holds: Callable[[Any], bool]
) -> list[Any]:
    """Return an argument as a list; raises UnsupportedError if it is not a list of `each`."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise UnsupportedError(f"{name}={values!r}: pass a list of {wanted}")
    found = list(values)
    for value in found:
        if not holds(value):
            raise UnsupportedError(f"{name} has {value!r}; each must be {each}")
    return found


def _is_size(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_count, value))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class _GraphProvider:
    """Captures graphs for new input sizes, with normalization and calibrated ranges."""

    def __init__(
        self, captured: AnySize, dtype: str, normalize: Normalization | None, home: torch.device
    ) -> None:
        self._captured, self._dtype, self._normalize, self._tensor_device = captured, dtype, normalize, home
        self._fused: Graph | None = None

    def graph_for(self, shapes: Shapes) -> Graph:
        graph = self.prepared(self._captured.graph_for(shapes))
        if self._fused is not None:
            graph.ranges, graph.means = transfer_ranges(self._fused, self._fuse(graph))
        return graph

    def prepared(self, graph: Graph) -> Graph:
        if self._normalize is not None:
            insert_normalization(graph, self._normalize)
        return graph

    def calibrate(self, graph: Graph, options: Calibration) -> None:
        """Measure the ranges of values in the first graph; graphs for other sizes reuse them."""
        fused = self._fuse(graph)
        options.apply(graph, fused, self._dtype, self._tensor_device)
        self._fused = replace(fused, ranges=graph.ranges, means=graph.means)

    def _fuse(self, graph: Graph) -> Graph:
        with own_arithmetic("fp32", self._tensor_device):
            return optimize(graph, self._dtype)


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    plans: int = DEFAULT_PLANS,
    measured: bool = False,
    kernels: bool = True,
    buffers: int = 1,
    memory: str | int | None = None,
    fixed_batch: int | None = None,
) -> Engine:
    """Load an engine from a file that `Engine.save` or `escalade build` wrote.

    Args:
        path: The file.
        device: "cpu", "twin" or a GPU such as "cuda:1"; default is the GPU if there is one.
        plans: As for `compile`.
        measured: As for `compile`.
        kernels: Use the machine code that the file has for this GPU, without a compiler. Pass False for files from
            untrusted sources.
        buffers: As for `compile`.
        memory: As for `compile`.
        fixed_batch: Make the engine deterministic: every batch is split into batches of this size.

    Raises:
        FileError: The file cannot be read, is damaged, or holds no network.
    """
    where = device if device is not None else ("cuda" if torch.cuda.is_available() else "cpu")
    require_device(where)
    with gc_paused(), reading(path, _tensor_device(where)) as (graph, dtype, artifacts):
        engine = Engine(
            graph,
            dtype,
            where,
            plans,
            measured=measured,
            buffers=buffers,
            memory=memory,
            fixed_batch=fixed_batch,
        )
        if kernels:
            engine.set_artifacts(artifacts, str(path))
    return engine


def _as_arguments(example: torch.Tensor | Sequence[Any]) -> tuple[Any, ...]:
    if isinstance(example, torch.Tensor):
        return (example,)
    if isinstance(example, tuple | list):
        return tuple(example)
    raise UnsupportedError(
        f"example_inputs is of type {type(example).__name__}; pass a tensor or a tuple of the model's arguments, and "
        "keyword arguments as example_keywords"
    )


def _tensor_device(where: torch.device | str) -> torch.device:
    """Return the device of an engine's tensors: the CPU for the twin."""
    return torch.device("cpu" if where == TWIN else where)


def _device(
    model: torch.nn.Module, inputs: Sequence[torch.Tensor], device: torch.device | str | None
) -> torch.device | str:
    if device is not None:
        require_device(device)
        return device
    return next(tensor.device for tensor in (*model.parameters(), *model.buffers(), *inputs))


def _on_model_device(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Move the inputs to the model's device, where it is captured wherever the engine will run."""
    home = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
    return [tensor if home is None else tensor.to(home) for tensor in inputs]


def _as_floats(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # A model is captured with the floats it takes, not with the uint8 images that `normalize` converts.
    return [tensor.float() if tensor.dtype == torch.uint8 else tensor for tensor in inputs]


def insert_normalization(graph: Graph, normalize: Normalization) -> None:
    """Insert a normalization node between the image input and everything that reads it."""
    images = [entry for entry in graph.inputs if len(entry.shape) == 4]
    if len(images) != 1:
        raise UnsupportedError(f"normalize needs a model with one image input; this model has {len(images)}")
    image = images[0]
    refusal = UnsupportedError(
        f"normalize={normalize!r}: pass (mean, std) with {image.shape[1]} finite means and {image.shape[1]} positive "
        "standard deviations, one per channel"
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
    node = Normalize.node(name, inputs, {}, image.shape, image.dtype)
    graph.replace_uses(image.name, name)
    first = next(iter(graph.nodes), None)
    if first is None:
        graph.append(node)
    else:
        graph.insert_before(first, node)
