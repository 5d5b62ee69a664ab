"""Graph passes, and the order in which they run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum

from escalade.engine.graph.forms import TENSOR_CORE_DTYPES
from escalade.engine.graph.graph import Graph
from escalade.engine.nodes.matching import match_folded, match_unfused, match_volumes
from escalade.engine.passes.attention import recognize_attention
from escalade.engine.passes.carried_ranges import collect_ranges, note_ranges
from escalade.engine.passes.casts import (
    drop_rounding,
    fuse_casts,
    narrow_autocast_layers,
    widen_mlp_gradients,
)
from escalade.engine.passes.channel_scale import fold_batch_norm
from escalade.engine.passes.epilogues import fuse_biases, fuse_expressions, fuse_operands, fuse_residuals
from escalade.engine.passes.estimates import Estimates
from escalade.engine.passes.fuse_mlp import fuse_mlp, fuse_small_mlp, fuse_squeeze_excite
from escalade.engine.passes.fuse_pools import fuse_max_pools, fuse_pooled_linear, hoist_pools
from escalade.engine.passes.fuse_stem import DTYPES as STEM_DTYPES
from escalade.engine.passes.fuse_stem import fuse_few_channels, fuse_stem
from escalade.engine.passes.keep_nchw import keep_nchw
from escalade.engine.passes.layout import (
    assign_layouts,
    convert_inputs,
    convert_output_dtypes,
    fold_output_scales,
    keep_nchw_products,
    pad_outputs,
    reorder_flattened,
)
from escalade.engine.passes.merge_convs import fuse_shortcuts, merge_parallel_convs
from escalade.engine.passes.norms import fuse_norm_gradients, recognize_norms, unfold_instance_norms
from escalade.engine.passes.pointwise import (
    fuse_neighbors,
    fuse_recognized,
    fuse_siblings,
    read_parts,
    read_unexpanded,
)
from escalade.engine.passes.prologues import fold_padding, fold_prologues, fuse_reduction_prologues
from escalade.engine.passes.quantize import quantize_convolutions
from escalade.engine.passes.shuffles import absorb_shuffles, recognize_shuffles
from escalade.engine.passes.simplify import drop_empty, eliminate_common_subexpressions, fold_constants
from escalade.engine.passes.stacks import join_gradients, join_slices, resolve_scatters, resolve_stacks
from escalade.engine.passes.step_attention import recognize_step_attention
from escalade.engine.passes.step_batch_norm import (
    fuse_batch_norm_epilogues,
    fuse_batch_norm_gradients,
    fuse_batch_norm_statistics,
    fuse_batch_norm_sums,
)
from escalade.engine.passes.step_convolutions import (
    fuse_bias_gradients,
    fuse_max_pool_gradients,
    fuse_upsampling,
    fuse_upsampling_gradients,
    mask_input_gradients,
)
from escalade.engine.passes.step_losses import fuse_cross_entropy, fuse_pointwise_losses
from escalade.engine.passes.step_permutes import sink_step_permutes
from escalade.engine.passes.step_recompute import recompute_in_gradients
from escalade.engine.passes.step_slices import scatter_slices
from escalade.engine.passes.views import (
    keep_sequences_as_images,
    pool_channels_last,
    sink_permutes,
    view_frames,
)
from escalade.ops.base.card import TWIN, Card
from escalade.ops.base.dtypes import QUANTIZED


class FusionLevel(StrEnum):
    """Amount of fusion in a plan; `escalade bench` compares them to show the gain of each."""

    naive = "naive"
    """One kernel per operation, by the lowest rung of its ladder."""
    separate = "separate"
    """One kernel per operation, by the best rung."""
    fused = "fused"
    """All fusions: BatchNorm folding, epilogues, prologues and more."""


def for_batch(
    graph: Graph,
    dtype: str,
    batch: int,
    fusion: FusionLevel = FusionLevel.fused,
    card: Card = TWIN,
    avoid: frozenset[str] = frozenset(),
) -> Graph:
    """Specialize an optimized graph for one batch size, with the fusions that the estimates favor at that size."""
    graph = graph.at(batch)
    drop_empty(graph)
    if fusion is FusionLevel.fused:
        estimates = Estimates(card, avoid)
        with graph.device:  # for new constants
            if dtype in QUANTIZED:
                quantize_convolutions(graph, dtype, estimates)
                graph.remove_dead_code()
            fuse_squeeze_excite(graph, dtype)  # before linear layers fuse its mean
            fuse_pooled_linear(graph, dtype)
            fuse_small_mlp(graph)
            fuse_residuals(graph)
            fuse_operands(graph)
            keep_nchw(graph, dtype, estimates)
            hoist_pools(graph, dtype, estimates)
            fold_prologues(graph, dtype, estimates)
            merge_parallel_convs(graph, dtype, estimates)
            fuse_max_pools(graph, dtype, estimates)
            read_parts(graph)
            graph.remove_dead_code()
    convert_output_dtypes(graph, dtype)
    return graph


def _docstring(apply: Callable[..., None]) -> str:
    return " ".join((inspect.getdoc(apply) or "").split())


def _epilogues(graph: Graph) -> None:
    """Fuse pointwise functions and additions into the epilogues of layers."""
    fuse_expressions(graph)
    fuse_residuals(graph)
    fuse_expressions(graph)
    fuse_operands(graph)
    fuse_expressions(graph)


ATTENTION = "attention"
# Passes over the graph of a training step, in order, by name of the technique.
_STEP_PASSES: tuple[tuple[str, Callable[[Graph], None]], ...] = (
    ("instance_norm", unfold_instance_norms),
    ("sequences", keep_sequences_as_images),
    ("frames", view_frames),
    ("casts", narrow_autocast_layers),
    ("shuffles", recognize_shuffles),  # before their permutations move
    ("stacks", join_gradients),
    ("slices", scatter_slices),
    ("permutes", sink_step_permutes),
    ("biases", fuse_biases),
    ("fused_casts", fuse_casts),
    ("layer_norm_backward", fuse_norm_gradients),
    ("pointwise", fuse_recognized),
    ("epilogues", _epilogues),
    ("batch_norm_training", fuse_batch_norm_epilogues),
    ("batch_norm_backward", fuse_batch_norm_gradients),  # before convolutions mask the same gradients
    ("conv2d_input_gradient", mask_input_gradients),
    ("conv2d_weight_gradient", fuse_bias_gradients),
    ("max_pool2d_backward", fuse_max_pool_gradients),
    ("upsample2d", fuse_upsampling),
    ("upsample2d_backward", fuse_upsampling_gradients),
    ("cross_entropy", fuse_cross_entropy),
    ("log_softmax", match_unfused),
    ("mlp_backward", widen_mlp_gradients),
    ("pointwise", fuse_neighbors),
    ("pointwise_loss", fuse_pointwise_losses),
    ("siblings", fuse_siblings),
)
# Passes that compare estimates; they run after those.
_ESTIMATED_PASSES: tuple[tuple[str, Callable[[Graph, str, Estimates], None]], ...] = (
    ("maxima", fuse_max_pools),
    ("batch_statistics", fuse_batch_norm_statistics),
    ("batch_norm_sums", fuse_batch_norm_sums),
    ("recompute", recompute_in_gradients),
)
STEP_TECHNIQUES: Mapping[str, str] = {
    ATTENTION: _docstring(recognize_step_attention),
    **{name: _docstring(apply) for name, apply in _STEP_PASSES},
    **{name: _docstring(apply) for name, apply in _ESTIMATED_PASSES},
}
"""Techniques of `optimize_step`, with a description of each."""


def optimize_step(
    graph: Graph,
    input_layouts: Mapping[str, str],
    output_layouts: Mapping[str, str],
    dtype: str = "fp32",
    card: Card | None = None,
    without: frozenset[str] = frozenset(),
) -> Graph:
    """Return the graph to plan for a training step.

    Weights are values in it, so nothing is folded into them, and values that gradients read are written.
    `input_layouts` and `output_layouts` give the layouts of images. With a card, fusions that depend on sizes are
    chosen by its estimates, with fp32 multiplied as `dtype`. Techniques in `without` are skipped.
    """
    graph = graph.copy()
    graph.remove_dead_code()
    fold_constants(graph)
    if ATTENTION not in without:
        recognize_step_attention(graph, card or TWIN)
    match_volumes(graph, dtype)
    for technique, apply in _STEP_PASSES:
        if technique not in without:
            apply(graph)
    assign_layouts(graph, input_layouts, output_layouts)
    graph.remove_dead_code()
    if card is not None:
        estimates = Estimates(card)
        for technique, choose in _ESTIMATED_PASSES:
            if technique not in without:
                choose(graph, dtype, estimates)
    return graph


def optimize(
    graph: Graph, dtype: str, fusion: FusionLevel = FusionLevel.fused, images: str = "nchw"
) -> Graph:
    """Return the graph to plan for this dtype and this layout of input images.

    Ranges of quantized dtypes are measured on it.
    """
    graph = replace(graph.copy(), images=images)
    graph.remove_dead_code()
    home = graph.device
    graph.constants = {name: tensor.to(home) for name, tensor in graph.constants.items()}
    drop_rounding(graph, dtype)
    with home:  # for new constants
        fold_constants(graph)
        match_folded(graph)
        match_volumes(graph, dtype)
        if dtype in QUANTIZED:
            note_ranges(graph)
        if fusion is FusionLevel.fused:
            _fuse(graph, dtype)
            if dtype == "fp32" and images == "nchw":  # in 16 bits PyTorch converts to NHWC too
                keep_nchw_products(graph)
        reorder_flattened(graph)
        convert_inputs(graph, pad_channels=dtype in TENSOR_CORE_DTYPES and fusion is not FusionLevel.naive)
        if images == "nhwc":
            assign_layouts(graph, {given.name: images for given in graph.inputs}, None)
        else:
            assign_layouts(graph)
            if fusion is FusionLevel.fused and dtype not in QUANTIZED:
                fold_output_scales(graph)
                if dtype in TENSOR_CORE_DTYPES:
                    pad_outputs(graph, dtype)
    graph.remove_dead_code()
    if dtype in QUANTIZED:
        graph.ranges = {**graph.ranges, **collect_ranges(graph)}
    return graph


def _fuse(graph: Graph, dtype: str) -> None:
    eliminate_common_subexpressions(graph)
    resolve_scatters(graph)
    read_unexpanded(graph)
    resolve_stacks(graph)
    join_slices(graph)
    recognize_norms(graph)
    recognize_attention(graph)
    recognize_shuffles(graph)
    keep_sequences_as_images(graph)
    if dtype in TENSOR_CORE_DTYPES:
        view_frames(graph)
    sink_permutes(graph)
    # First fold a bias that the model adds itself, before it is fused with what follows.
    fold_batch_norm(graph, dtype)
    fuse_recognized(graph)
    pool_channels_last(graph)
    fold_batch_norm(graph, dtype)
    _epilogues(graph)
    fold_padding(graph)
    absorb_shuffles(graph, dtype)
    if dtype in TENSOR_CORE_DTYPES:  # only their kernels accumulate a second input
        fuse_shortcuts(graph)
    if dtype in STEM_DTYPES:
        fuse_stem(graph)
    fuse_few_channels(graph)
    fuse_mlp(graph, dtype)
    fuse_reduction_prologues(graph)  # after chains of layers have fused theirs
    fuse_neighbors(graph)
