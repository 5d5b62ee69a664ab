"""Rewritings of a captured graph, in the order in which they help each other."""

from __future__ import annotations

from escalade.engine.graph.graph import Graph
from escalade.engine.nodes.translate import translate_layers
from escalade.engine.passes.batch_norm import fold_batch_norm
from escalade.engine.passes.few_channels import fuse_few_channels
from escalade.engine.passes.fuse import fuse_activations, fuse_residuals, fuse_shortcuts
from escalade.engine.passes.fusion_level import FusionLevel
from escalade.engine.passes.layout import convert_between, convert_inputs, reorder_flattened
from escalade.engine.passes.mlp import fuse_mlp
from escalade.engine.passes.pooled import fuse_pooled
from escalade.engine.passes.quantise import quantise_convolutions
from escalade.engine.passes.simplify import fold_constants, remove_dead_code
from escalade.engine.passes.stem import fuse_stem

TENSOR_CORE_DTYPES = ("tf32", "fp16", "bf16", "fp8")
STEM_DTYPES = ("fp16", "bf16", "fp8")


def optimise(graph: Graph, dtype: str, fusion: FusionLevel = FusionLevel.fused) -> Graph:
    """The graph that a plan of this dtype is made for."""
    graph = fuse(graph, dtype, fusion)
    if dtype == "fp8":
        quantise_convolutions(graph, graph.ranges)
        remove_dead_code(graph)
    return graph


def for_batch(graph: Graph, dtype: str, batch: int, fusion: FusionLevel = FusionLevel.fused) -> Graph:
    """An optimised graph with every size a number, and with what pays at some batch sizes only."""
    graph = graph.at(batch)
    if fusion is FusionLevel.fused:
        fuse_pooled(graph, dtype)
    return graph


def fuse(graph: Graph, dtype: str, fusion: FusionLevel = FusionLevel.fused) -> Graph:
    """The fused graph before anything is quantised: what FP8's ranges are measured on."""
    graph = graph.copy()
    remove_dead_code(graph)
    fold_constants(graph)
    translate_layers(graph)
    if fusion is FusionLevel.fused:
        _fuse(graph, dtype)
    reorder_flattened(graph)
    convert_inputs(graph, pad_channels=dtype in TENSOR_CORE_DTYPES and fusion is not FusionLevel.naive)
    convert_between(graph)
    remove_dead_code(graph)
    return graph


def _fuse(graph: Graph, dtype: str) -> None:
    fold_batch_norm(graph)
    fuse_activations(graph)
    fuse_residuals(graph)
    fuse_activations(graph)
    if dtype in TENSOR_CORE_DTYPES:  # the kernels that can take two inputs
        fuse_shortcuts(graph)
    if dtype in STEM_DTYPES:
        fuse_stem(graph)
    fuse_few_channels(graph)
    fuse_mlp(graph)
