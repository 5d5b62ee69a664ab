"""Inferred sizes match PyTorch's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from escalade.engine import check
from escalade.engine.capture.export import capture
from escalade.engine.check import check_graph
from escalade.engine.graph.aten import OperatorError
from escalade.engine.graph.graph import Node
from escalade.engine.nodes import BY_NAME, OPERATORS
from escalade.engine.nodes.evaluate import compute
from escalade.engine.nodes.signature import RESULT, SizeError
from escalade.ops.pad2d import MODES as PADDINGS
from tests.engine.files import EveryKind


def pairs(least: int, most: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(least, most), st.integers(least, most))


def same_as_pytorch(op: str, attributes: dict[str, Any], **sizes: tuple[int, ...]) -> None:
    """Both return the same sizes, or neither returns any."""
    node, inputs = Node("n", op, {}, attributes, (), "float32"), {}
    for role, size in sizes.items():
        inputs[role] = check._Spec(size, torch.float32)
    try:
        expected = check._expected_sizes(BY_NAME[op], node, inputs, ())
        shape = (
            expected[RESULT]
            if all(expected.get(role, size) == size for role, size in sizes.items())
            else None
        )
    except SizeError:
        shape = None
    tensors = {role: torch.zeros(size) for role, size in sizes.items()}
    node = replace(node, shape=shape or ())
    if shape is None:
        with pytest.raises(OperatorError):
            compute(node, tensors, torch.device("cpu"))
    else:
        compute(node, tensors, torch.device("cpu"))  # which compares the sizes


@given(
    image=pairs(1, 9), window=pairs(1, 4), stride=pairs(1, 3), padding=pairs(0, 3), dilation=pairs(1, 2),
    groups=st.integers(1, 3), channels=st.integers(1, 3), filters=st.integers(1, 4), more=st.sampled_from((0, 0, 1)),
)  # fmt: skip
def test_convolutions(
    image: Any, window: Any, groups: int, channels: int, filters: int, more: int, **rest: Any
) -> None:
    attributes = {**rest, "groups": groups, "relu": False}
    weight = (filters, channels, *window)
    same_as_pytorch(
        "conv2d", attributes, x=(2, channels * groups + more, *image), weight=weight, bias=(filters + more,)
    )


@given(
    image=pairs(1, 9), kernel=pairs(1, 4), stride=pairs(1, 5), padding=pairs(0, 3), ceil_mode=st.booleans(),
    dilation=pairs(1, 3),
)  # fmt: skip
def test_pools(image: Any, dilation: Any, **attributes: Any) -> None:
    same_as_pytorch("max_pool2d", {**attributes, "dilation": dilation}, x=(2, 3, *image))
    same_as_pytorch("avg_pool2d", {**attributes, "count_padding": False, "divisor": 0}, x=(2, 3, *image))


@given(
    image=pairs(1, 5), window=pairs(1, 4), stride=pairs(1, 3), padding=pairs(0, 3), output_padding=pairs(0, 2),
    dilation=pairs(1, 2), groups=st.integers(1, 3), channels=st.integers(1, 3), filters=st.integers(1, 4),
)  # fmt: skip
def test_transposed_convolutions(
    image: Any, window: Any, groups: int, channels: int, filters: int, **rest: Any
) -> None:
    if any(more >= step for more, step in zip(rest["output_padding"], rest["stride"], strict=True)):
        return  # PyTorch accepts it with a dilation, the operator does not
    attributes = {**rest, "groups": groups, "relu": False}
    sizes = {"gradient": (2, filters, *image), "weight": (filters, channels, *window)}
    same_as_pytorch("conv_transpose2d", attributes, **sizes, bias=(channels * groups,))


@given(
    image=pairs(1, 5), rows=pairs(-2, 6), columns=pairs(0, 6), mode=st.sampled_from(PADDINGS),
    factor=st.integers(1, 3), channels=st.integers(1, 9), down=st.booleans(),
)  # fmt: skip
def test_moved_pixels(
    image: Any, rows: Any, columns: Any, mode: str, factor: int, channels: int, down: bool
) -> None:
    if (
        min(rows) >= 0 or mode == "constant"
    ):  # PyTorch accepts negative ones elsewhere too, the operator does not
        same_as_pytorch("pad2d", {"pads": (*rows, *columns), "mode": mode, "value": 0.0}, x=(2, 3, *image))
    same_as_pytorch("pixel_shuffle", {"factor": factor, "down": down}, x=(2, channels, *image))


@given(features=st.integers(1, 4), rows=st.lists(st.integers(1, 3), max_size=3), outputs=st.integers(1, 3))
def test_layers(features: int, rows: list[int], outputs: int) -> None:
    x = (*rows, features)
    same_as_pytorch("linear", {"relu": False}, x=x, weight=(outputs, features), bias=(outputs,))
    same_as_pytorch("linear", {"relu": False}, x=x, weight=(outputs, features + 1), bias=(outputs,))
    vector = (features,)
    same_as_pytorch(
        "layer_norm", {"epsilon": 1e-5, "rms": False, "relu": False}, x=x, weight=vector, bias=vector
    )
    for name in ("softmax", "log_softmax"):
        same_as_pytorch(name, {"of_channels": False}, x=x)


def test_every_kind_that_capture_makes_is_known() -> None:
    """The model of the file tests has them all."""
    from escalade.engine.compiler import insert_normalization

    graph = capture(EveryKind().eval(), (torch.randn(2, 3, 9, 9),), {"mask": torch.randn(2, 4)})
    insert_normalization(graph, ((0.5,) * 3, (0.2,) * 3))
    check_graph(graph)
    assert {node.op for node in graph} == {operator.name for operator in OPERATORS if operator.signature} | {
        "aten"
    }
