"""Constants of several plans: shared if bitwise identical, and converted to each form that a kernel needs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import torch

from escalade.device.recipe import Workspace
from escalade.engine.graph.graph import Graph
from escalade.engine.nodes.lowering import FP32, NHWC, STORED
from escalade.engine.plan.constants import ConstantCache, ConstantPool
from escalade.engine.plan.memory import allocate_persistent
from escalade.engine.plan.plan import ConstantForm

CPU = torch.device("cpu")


def graph_with(**constants: torch.Tensor) -> Graph:
    return Graph((), {}, constants, ())


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
        return False
    return one.contiguous().view(torch.uint8).tolist() == other.contiguous().view(torch.uint8).tolist()


def test_constants_are_shared_only_if_they_are_the_same_to_the_bit() -> None:
    def variants() -> list[torch.Tensor]:
        square = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # a symmetric matrix, so that only strides differ
        negative = torch.tensor([[1.0, -0.0], [0.0, 1.0]])
        images = torch.ones(2, 2, 2, 2)
        nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
        return [
            square, square.t(), negative, square.half(), square.bfloat16(), square.int(), square.flatten(),
            images, images.contiguous(memory_format=torch.channels_last), nans[:1], nans[1:], nans,
            torch.zeros(0), torch.zeros(0, 2),
        ]  # fmt: skip

    for one, other in product(variants(), variants()):
        pool, graphs = ConstantPool(), (graph_with(w=one), graph_with(w=other))
        for graph in graphs:
            pool.share(graph)
        first, second = (graph.constants["w"] for graph in graphs)
        assert first is one, "the first one known is everybody's"
        assert (second is first) == _is_same(one, other), (one, other)
        assert _is_same(second, other)


def test_a_constant_is_converted_to_each_requested_form() -> None:
    weight = torch.randn(4, 3, 2, 2)
    graph = graph_with(w=weight)
    made = ConstantCache("fp16", CPU)
    for _ in range(2):
        found = {form: made.get(ConstantForm("w", form), graph) for form in (STORED, NHWC, FP32)}
        assert [found[form].dtype for form in found] == [torch.float16, torch.float16, torch.float32]
        assert found[STORED].is_contiguous() and found[FP32].is_contiguous()
        assert found[NHWC].is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(found[FP32], weight, rtol=0, atol=0)
    other = graph_with(w=weight + 1)
    torch.testing.assert_close(made.get(ConstantForm("w", FP32), other), weight + 1)


def test_programs_share_packed_weights_and_no_counters() -> None:
    """Two programs may run concurrently: shared counters would mix."""
    weights = Workspace("packed", 64)
    plan = cast(Any, SimpleNamespace(persistent={"a": weights, "b": replace(weights, zeroed=True)}))
    first = allocate_persistent(plan, CPU, {})
    second = allocate_persistent(plan, CPU, first)
    assert second["a"] is first["a"] and second["b"].data_ptr() != first["b"].data_ptr()
    assert not first["b"].any() and not second["b"].any()
