"""A valid call of every public operator, and the same with one invalid argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from escalade import ops
from escalade.ops.optimizer_step import no_progress, sgd

Arguments = dict[str, Any]


def _images(*names: str) -> Arguments:
    return {name: torch.ones(2, 8, 6, 6) for name in names}


def _rows(*names: str) -> Arguments:
    return {name: torch.ones(4, 8) for name in names}


def _channels(*names: str) -> Arguments:
    return {name: torch.ones(8) for name in names}


_X, _ROWS, _PAIR = _images("x"), _rows("x"), _rows("x", "target")
_AFFINE, _TARGET, _SCALE = (
    _channels("weight", "bias"),
    {"target": torch.ones(4).long()},
    {"scale": torch.ones(())},
)
_SQUARES, _FILTERS = {"weight": torch.ones(8, 8)}, {"weight": torch.ones(8, 8, 1, 1)}
_POOL = {"kernel": 2, "stride": 2, "padding": 0}
_MLP = {"parameters": [torch.ones(8, 8)], "layers": "8-8"}
RIGHT: dict[str, Arguments] = {
    "adaptive_avg_pool2d": {**_X, "output": 2},
    "add": _images("x", "residual"),
    "attention": {name: torch.ones(1, 2, 5, 16) for name in "qkv"} | {"bias": torch.ones(5, 5), "scale": 0.5},
    "avg_pool2d": {**_X, **_POOL},
    "avg_pool2d_backward": {**_images("gradient"), "size": (12, 12), **_POOL},
    "batch_norm": {**_X, **_AFFINE, **_channels("running_mean", "running_var")},
    "batch_norm_backward": {**_images("gradient", "x"), **_AFFINE, **_channels("mean", "rstd")},
    "batch_norm_training": {**_X, **_AFFINE, **_channels("running_mean", "running_var")},
    "batch_statistics": _X,
    "conv2d": {**_X, **_FILTERS, "stride": 1, "padding": 0, "groups": 1},
    "conv2d_input_gradient": {**_images("gradient"), **_FILTERS, "size": (6, 6), "stride": 1},
    "conv2d_weight_gradient": {**_images("x", "gradient"), "filter_size": 1, "padding": 0},
    "cross_entropy": {**_ROWS, **_TARGET, "reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0},
    "cross_entropy_with_gradient": {**_ROWS, **_TARGET, **_SCALE},
    "ctc_loss": {
        "x": torch.ones(5, 3, 8), "targets": torch.ones(3, 2).long(), "input_lengths": torch.full((3,), 5),
        "target_lengths": torch.full((3,), 2), "blank": 0, "zero_infinity": False,
    },
    "few_channels": {"x": torch.ones(2, 1, 6, 6), "weight": torch.ones(8, 1, 3, 3), "padding": 1, "pool": 1},
    "group_norm": {**_X, "groups": 2, **_AFFINE, "epsilon": 1e-5},
    "layer_norm": {**_ROWS, **_AFFINE, "epsilon": 1e-5},
    "linear": {**_ROWS, **_SQUARES, "relu": False},
    "max_pool2d": {**_X, **_POOL},
    "max_pool2d_backward": {"gradient": torch.ones(2, 8, 3, 3), **_POOL, **_X},
    "max_pool2d_with_places": {**_X, **_POOL},
    "mlp": {**_ROWS, **_MLP},
    "mlp_backward": {**_rows("x", "grad_y"), **_MLP},
    "mse_loss": {**_PAIR, "reduction": "mean"},
    "optimizer_step": {
        "rule": sgd(), "parameters": [torch.ones(8)], "gradients": [torch.ones(8)], "state": {},
        "scalars": torch.ones(1), "progress": no_progress(),
    },
    "pad2d": {**_X, "pads": (1, 1, 1, 1), "mode": "constant", "value": 0.0},
    "pixel_shuffle": {**_X, "factor": 2, "down": False},
    "pointwise": {"expression": "x + y", **_rows("x", "y")},
    "pointwise_loss": {**_PAIR, "expression": "square(x - target), 2 * (x - target)", "reduction": "mean"},
    "pointwise_loss_with_gradient": {**_PAIR, **_SCALE, "expression": "square(x - target), 2 * (x - target)"},
    "quantise": {**_ROWS, "factor": torch.ones(1)},
    "reduce": {**_ROWS, "kind": "sum", "first": -1, "last": -1},
    "relu": {**_ROWS, "limit": 6.0},
    "relu_": {**_ROWS, "limit": 6.0},
    "softmax": _ROWS,
    "squeeze_excite": {**_X, **_SQUARES, "bias": None, "gate_weight": torch.ones(8, 8), "gate_bias": None},
    "top_k": {**_ROWS, "k": 2},
    "upsample2d": {**_X, "output": (12, 12), "mode": "nearest"},
    "upsample2d_backward": {**_images("gradient"), "size": (3, 3), "mode": "nearest"},
}  # fmt: skip


def _wrong(value: Any) -> Iterator[tuple[str, Any]]:
    """Invalid replacements of a valid value."""
    yield "None", None
    yield "object", object()
    yield "text", "nonsense"
    yield "list of texts", ["nonsense"]
    if isinstance(value, torch.Tensor):
        yield "array", value.numpy()
        yield "int32", value.int()
        yield "float64", value.double()
        yield "complex", value.to(torch.complex64)
        yield "a row more", torch.ones([size + 1 for size in value.shape])
        yield "a dimension more", value[None]
        yield "no dimension", torch.ones(())
        yield "meta", value.to("meta")
        yield "sparse", value.to_sparse()
        yield "list of it", [value]
    elif isinstance(value, list):
        yield "no list", value[0]
        yield "none of them", []
        yield "sizes", [torch.ones(3, 5) for _ in value]
        yield "types", [one.int() for one in value]
    else:
        yield "negative", -3
        yield "fraction", 1.5
        yield "three", (1, 2, 3)
        yield "tensor", torch.ones(2)
        yield "large", 2**70


def calls(name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Invalid calls of an operator, each with its error."""
    function, right = getattr(ops, name), RIGHT[name]
    for argument, value in {**right, "rung": None}.items():
        for what, wrong in _wrong(value):
            if not (argument == "rung" and wrong is None):
                yield f"{argument}: {what}", partial(function, **{**right, argument: wrong})
