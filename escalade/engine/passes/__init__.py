"""Rewritings of a captured graph, in the order in which they help each other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace

from escalade.engine.graph.forms import TENSOR_CORE_DTYPES
from escalade.engine.graph.graph import Graph
from escalade.engine.nodes import OPERATORS
from escalade.engine.nodes.base import Operator
from escalade.engine.nodes.recognition import recognise_folded
from escalade.engine.passes.batch_norm import fold_batch_norm
from escalade.engine.passes.casts import drop_rounding, narrow_layers
from escalade.engine.passes.constant_folding import fold_constants
from escalade.engine.passes.cse import merge_repetitions
from escalade.engine.passes.empty import drop_empty
from escalade.engine.passes.epilogues import fuse_expressions, fuse_operands, fuse_residuals
from escalade.engine.passes.estimates import Estimates
from escalade.engine.passes.fuse_max_pool import take_maxima
from escalade.engine.passes.fusion_level import FusionLevel
from escalade.engine.passes.hoist_pool import pool_first
from escalade.engine.passes.layout import (
    assign_layouts,
    convert_inputs,
    leave_products,
    pad_returned,
    reorder_flattened,
    scale_returned,
    type_returned,
)
from escalade.engine.passes.merge_parallel_convs import join_siblings
from escalade.engine.passes.padding import fold_padding
from escalade.engine.passes.permutes import sink_permutes
from escalade.engine.passes.pointwise import join_neighbours, join_recognised, read_unrepeated
from escalade.engine.passes.prologues import fold_prologues
from escalade.engine.passes.quantise import quantise_convolutions
from escalade.engine.passes.scatters import resolve_scatters
from escalade.engine.passes.sequences import keep_images
from escalade.engine.passes.shuffles import absorb_shuffles, recognise_shuffles
from escalade.engine.passes.stacks import resolve_stacks
from escalade.ops.base.card import TWIN, Card


def optimise(
    graph: Graph, dtype: str, fusion: FusionLevel = FusionLevel.fused, images: str = "nchw"
) -> Graph:
    """The graph that a plan of this dtype is made for, where images come so."""
    graph = fuse(graph, dtype, fusion, images)
    if dtype == "fp8":
        quantise_convolutions(graph, graph.ranges)
        graph.remove_dead_code()
    return graph


def for_batch(
    graph: Graph,
    dtype: str,
    batch: int,
    fusion: FusionLevel = FusionLevel.fused,
    card: Card = TWIN,
    avoid: frozenset[str] = frozenset(),
) -> Graph:
    """An optimised graph with every size a number, and with what pays at some batch sizes only, on a card and without
    the rungs that `avoid` names."""
    graph = graph.at(batch)
    drop_empty(graph)
    if fusion is FusionLevel.fused:
        with graph.device:  # new constants are made where the others are
            for operator in OPERATORS:
                operator.fuse_for_batch(graph, dtype)
            fuse_residuals(graph)
            fuse_operands(graph)
            estimates = Estimates(card, avoid)
            pool_first(graph, dtype, estimates)
            fold_prologues(graph, dtype, estimates)
            join_siblings(graph, dtype, estimates)
            take_maxima(graph, dtype, estimates)
            graph.remove_dead_code()
    type_returned(graph, dtype)
    return graph


def _sentence(apply: Callable[..., None]) -> str:
    """What a pass does, as its docstring has it, on one line."""
    return " ".join((inspect.getdoc(apply) or "").split())


def _epilogues(graph: Graph) -> None:
    """Has layers apply functions of single elements, and add values, on the way out."""
    fuse_expressions(graph)
    fuse_residuals(graph)
    fuse_expressions(graph)
    fuse_operands(graph)
    fuse_expressions(graph)


_STEP: tuple[tuple[str, Callable[[Graph], None]], ...] = (
    ("casts", narrow_layers),
    ("pointwise", join_recognised),
    ("epilogues", _epilogues),
    *(
        (operator.name, operator.fuse_step)
        for operator in OPERATORS
        if type(operator).fuse_step is not Operator.fuse_step
    ),
    ("pointwise", join_neighbours),
    *(
        (operator.name, operator.fuse_joined)
        for operator in OPERATORS
        if type(operator).fuse_joined is not Operator.fuse_joined
    ),
)
"""What makes the graph of a training step faster, in order, by the name of the technique."""
_MAXIMA = "maxima"
STEP_TECHNIQUES: Mapping[str, str] = {
    **{name: _sentence(apply) for name, apply in _STEP},
    _MAXIMA: _sentence(take_maxima),
}
"""The techniques of `optimise_step`, and what each does."""


def optimise_step(
    graph: Graph,
    given_as: Mapping[str, str],
    returned: Mapping[str, str],
    dtype: str = "fp32",
    card: Card | None = None,
    without: frozenset[str] = frozenset(),
) -> Graph:
    """The graph that a plan of a training step is made for: weights are values in it, so nothing goes into them, and
    what gradients read is written. Images are `given_as` they lie, and `returned` in these layouts. What pays at some
    sizes only is done for a card, if kernels run, with fp32 multiplied as `dtype` says. `without` names techniques
    that are left out."""
    graph = graph.copy()
    graph.remove_dead_code()
    fold_constants(graph)
    for technique, apply in _STEP:
        if technique not in without:
            apply(graph)
    assign_layouts(graph, given_as, returned)
    graph.remove_dead_code()
    if card is not None and _MAXIMA not in without:
        take_maxima(graph, dtype, Estimates(card))
    return graph


def fuse(graph: Graph, dtype: str, fusion: FusionLevel = FusionLevel.fused, images: str = "nchw") -> Graph:
    """The fused graph before anything is quantised: what FP8's ranges are measured on."""
    graph = replace(graph.copy(), images=images)
    graph.remove_dead_code()
    home = graph.device
    graph.constants = {name: tensor.to(home) for name, tensor in graph.constants.items()}
    drop_rounding(graph, dtype)
    with home:  # new constants are made where the others are
        fold_constants(graph)
        recognise_folded(graph)
        if fusion is FusionLevel.fused:
            _fuse(graph, dtype)
            if dtype in ("fp32", "tf32") and images == "nchw":  # in 16 bits PyTorch converts too
                leave_products(graph)
        reorder_flattened(graph)
        convert_inputs(graph, pad_channels=dtype in TENSOR_CORE_DTYPES and fusion is not FusionLevel.naive)
        if images == "nhwc":
            assign_layouts(graph, {given.name: images for given in graph.inputs}, None)
        else:
            assign_layouts(graph)
            if fusion is FusionLevel.fused and dtype != "fp8":
                scale_returned(graph)
                if dtype in TENSOR_CORE_DTYPES:
                    pad_returned(graph, dtype)
    graph.remove_dead_code()
    return graph


def _fuse(graph: Graph, dtype: str) -> None:
    merge_repetitions(graph)
    resolve_scatters(graph)
    read_unrepeated(graph)
    resolve_stacks(graph)
    recognise_shuffles(graph)
    keep_images(graph)
    sink_permutes(graph)
    # A bias that the model adds itself, before it is one node with what follows.
    fold_batch_norm(graph, dtype)
    join_recognised(graph)
    fold_padding(graph)
    fold_batch_norm(graph, dtype)
    fuse_expressions(graph)
    fuse_residuals(graph)
    fuse_expressions(graph)
    fuse_operands(graph)
    fuse_expressions(graph)
    absorb_shuffles(graph, dtype)
    for operator in OPERATORS:
        operator.fuse(graph, dtype)
    join_neighbours(graph)
