"""Mutants of CUDA sources, run by the twin."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LADDERS, CHANGED = "tests/ops/test_ladders.py", "tests/ops/test_changed.py"


def _of(file: str, name: str, old: str, new: str, operation: str = "") -> Mutant:
    """A mutant of a kernel, run by the tests of its operation and by those of rungs that have changed."""
    operation = operation or file.split("/")[0]
    return Mutant(
        f"kernels/{name}", f"escalade/kernels/{file}", old, new, (f"tests/ops/{operation}", LADDERS, CHANGED),
        f"(test_changed and {operation}) or (test_ladders and {operation} and merge) or test_{operation}",
    )  # fmt: skip


def _direct(name: str, old: str, new: str) -> Mutant:
    tests = ("tests/ops/conv2d/rungs/test_direct.py", LADDERS, CHANGED)
    chosen = "test_direct or (test_changed and conv2d) or (foot and conv2d)"
    return Mutant(f"kernels/{name}", "escalade/kernels/conv2d/direct.cu", old, new, tests, chosen)


def _planes(name: str, old: str, new: str) -> Mutant:
    tests = (
        "tests/ops/conv2d/rungs/test_sm90_planes.py",
        "tests/ops/conv2d_input_gradient/rungs/test_planes.py",
    )
    return Mutant(f"kernels/{name}", "escalade/kernels/conv2d/sm90_planes.cu", old, new, tests)


MUTANTS: tuple[Mutant, ...] = (
    _planes("planes-begin-between-16-bytes", "- shape.pad_w - SHIFT,", "- shape.pad_w,"),
    _planes("planes-forget-the-shift", "* STRIDE_W + SHIFT) * 4;", "* STRIDE_W) * 4;"),
    _planes("planes-free-weights-too-early", "wgmma_wait<1>();", "wgmma_wait<2>();"),
    _planes(
        "planes-of-both-teams-in-one-ring",
        "start + team * STAGES * Windows::STAGE, barriers(team)",
        "start, barriers(team)",
    ),
    _planes(
        "planes-store-beyond-the-image",
        "exists && u32(h) < u32(result.height) &&",
        "exists && h < result.height &&",
    ),
    Mutant(
        "kernels/planes-of-phases-in-the-wrong-order",
        "escalade/kernels/conv2d/sm90_planes_weights.cu",
        "PHASES_H * (size.rows - 1 - i)",
        "PHASES_H * i",
        ("tests/ops/conv2d_input_gradient/rungs/test_planes.py",),
    ),
    _of(
        "softmax/block_per_row.cu",
        "softmax-mask-one-too-many",
        "values[i][e] = i * THREADS + thread < packs ?",
        "values[i][e] = i * THREADS + thread <= packs ?",
    ),
    _of(
        "softmax/block_per_row.cu",
        "softmax-rows-beyond-the-last",
        "if (row >= rows) return;",
        "if (row > rows) return;",
    ),
    _of(
        "softmax/columns.cu",
        "softmax-columns-forget-their-stride",
        "to += 1LL * PARTS * inner",
        "to += 1LL * PARTS",
    ),
    _of(
        "softmax/softmax.cuh",
        "softmax-without-its-activation",
        "activated<HAS_RELU>(softmax_result<LOG>(term, divisor))",
        "softmax_result<LOG>(term, divisor)",
    ),
    _of(
        "softmax_backward/softmax_backward.cuh",
        "gradients-of-softmax-without-probabilities",
        "to_float(dy) * to_float(y);",
        "to_float(dy);",
    ),
    _of(
        "softmax_backward/in_registers.cu",
        "gradients-of-softmax-sum-packs-twice",
        "thread < packs ? row_term(gradients[i].at[e], values[i].at[e]) : 0.f",
        "thread < packs + 1 ? row_term(gradients[i].at[e], values[i].at[e]) : 0.f",
    ),
    _of(
        "softmax_backward/columns.cu",
        "gradients-of-softmax-sum-columns-twice",
        "column.has(i, classes) ? row_term(gradients[i].at[e], values[i].at[e]) : 0.f",
        "row_term(gradients[i].at[e], values[i].at[e])",
    ),
    _of(
        "common/row_sums.cuh",
        "row-sums-without-the-barrier",
        "parts[threadIdx.x / 32] = value;\n        __syncthreads();\n",
        "parts[threadIdx.x / 32] = value;\n",
        "softmax_backward",
    ),
    _of(
        "reduce/columns.cu",
        "reduce-without-the-barrier",
        "        __syncthreads();\n        if (works && row_in_block < kept) {",
        "        if (works && row_in_block < kept) {",
    ),
    _of(
        "pad2d/runs.cu",
        "padding-with-the-wrong-edge",
        "source(output_column - left, width)",
        "source(output_column - top, width)",
    ),
    _of(
        "common/image_packs.cuh",
        "packs-that-stay-in-their-plane",
        "at.row = 0, ++at.plane;",
        "at.row = 0;",
        "pad2d",
    ),
    _of("convert/rows.cu", "rows-of-the-wrong-pitch", "y + row * y_pitch", "y + row * x_pitch"),
    _of(
        "common/columns.cuh",
        "columns-without-the-first-barrier",
        "        __syncthreads();  // the previous round has been read\n",
        "",
        "softmax",
    ),
    _of(
        "common/row.cuh",
        "rows-without-the-second-barrier",
        "parts[threadIdx.x / 32] = value;\n        __syncthreads();\n",
        "parts[threadIdx.x / 32] = value;\n",
        "softmax",
    ),
    _of(
        "layer_norm/in_registers.cu",
        "layer-norm-counts-what-is-not-there",
        "squares += has(i) ? difference * difference : 0.f;",
        "squares += difference * difference;",
    ),
    _of(
        "layer_norm/in_registers.cu",
        "layer-norm-without-epsilon",
        "rsqrtf(sum_over_row_threads<ROW_THREADS, 1>(squares) * one_over_features + epsilon)",
        "rsqrtf(sum_over_row_threads<ROW_THREADS, 1>(squares) * one_over_features)",
    ),
    _of(
        "reduce/columns.cu",
        "reduce-loses-a-row-of-odd-heights",
        "const int kept = (left + FOLD - 1) / FOLD;",
        "const int kept = left / FOLD > 0 ? left / FOLD : 1; left = min(left, kept * FOLD);",
    ),
    _of(
        "reduce/reductions_merge.cu",
        "reduce-merges-other-results",
        "partial[split * results + result]",
        "partial[split + result]",
    ),
    _of(
        "max_pool2d/shared_tile.cu",
        "max-pool-without-a-barrier",
        "        tile[at] = image[row * shape.width + column];\n    }\n    __syncthreads();\n",
        "        tile[at] = image[row * shape.width + column];\n    }\n",
    ),
    _of(
        "max_pool2d/row_packs.cu",
        "max-pool-rows-beyond-the-image",
        "(top + r < 0 || top + r >= shape.height)) continue;\n        RowInputs seen;\n        seen.load(",
        "(top + r < 0 || top + r > shape.height)) continue;\n        RowInputs seen;\n        seen.load(",
    ),
    _direct(
        "convolution-swaps-rows-and-columns-of-strides",
        "output_column * shape.stride_w",
        "output_column * shape.stride_h",
    ),
    _direct("convolution-swaps-rows-and-columns-of-dilation", "s * shape.dilation_w", "s * shape.dilation_h"),
    _direct(
        "convolution-pads-columns-as-rows",
        "output_column * shape.stride_w - shape.pad_w",
        "output_column * shape.stride_w - shape.pad_h",
    ),
    _direct(
        "convolution-reads-the-first-groups-channels",
        "const int channel = first_channel + c;",
        "const int channel = c;",
    ),
    _of(
        "top_k/ranking.cuh",
        "the-higher-of-equal-classes",
        "<< 32 | ~static_cast<u32>(class_number)",
        "<< 32 | static_cast<u32>(class_number)",
    ),
    _of(
        "cross_entropy/rows.cuh",
        "ignored-rows-have-gradients",
        "counts ? derivative * weight : 0.f",
        "derivative * weight",
    ),
    _of(
        "adaptive_avg_pool2d/window.cuh",
        "windows-end-early",
        "((at + 1) * size + outputs - 1) / outputs",
        "(at + 1) * size / outputs",
    ),
    _of(
        "adaptive_avg_pool2d/column_sums.cu",
        "a-row-below-the-window",
        "load_pack_if<Element, VECTOR>(from < past,",
        "load_pack_if<Element, VECTOR>(from <= past,",
    ),
    _of(
        "adaptive_avg_pool2d/column_sums.cu",
        "one-row-for-all-parts",
        "part % SPLITS; top < past;",
        "0; top < past;",
    ),
)
