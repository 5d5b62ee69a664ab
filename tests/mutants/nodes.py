"""Mutants of graph operators, of their lowering, and of capturing."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

NODES = "escalade/engine/nodes/"
CAPTURE = "escalade/engine/capture/"
RANDOM = "tests/engine/plan/test_random_plans.py"
OPERATORS = "tests/engine/nodes/test_operators.py"
EXPORT = ("tests/engine/capture/test_export.py", "tests/engine/capture/test_trace.py")


def _of(file: str, name: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(f"nodes/{name}", NODES + file, old, new, tests or (RANDOM, OPERATORS))


MUTANTS: tuple[Mutant, ...] = (
    _of(
        "views.py", "a-range-with-a-step-is-a-range", 'if call("step", 1) == 1 else None', "if True else None"
    ),
    _of("views.py", "ranges-from-the-end-begin-at-it", "start + whole if start < 0 else start", "start"),
    Mutant(
        "nodes/pieces-of-the-size-of-the-last",
        "escalade/engine/nodes/views.py",
        '-(-whole // call("chunks", 1))',
        "own",
        ("tests/engine/test_twin.py",),
    ),
    Mutant(
        "nodes/rows-cut-at-the-other-end",
        "escalade/engine/nodes/views.py",
        "fewer = (-first, first + length - form.shape[dim])",
        "fewer = (first + length - form.shape[dim], -first)",
        ("tests/engine/test_twin.py",),
    ),
    Mutant(
        "nodes/columns-are-cut-as-rows",
        "escalade/engine/nodes/views.py",
        "if dim == 2 else (0, 0, *fewer)",
        "if dim >= 2 else (0, 0, *fewer)",
        ("tests/engine/test_twin.py",),
    ),
    Mutant(
        "nodes/permutes-in-a-row-the-other-way",
        "escalade/engine/nodes/views.py",
        'tuple(before.attributes["order"][dim] for dim in order)',
        'tuple(order[dim] for dim in before.attributes["order"])',
        ("tests/engine/test_twin.py",),
    ),
    Mutant(
        "nodes/permutes-of-any-strides-are-nothing",
        "escalade/engine/nodes/views.py",
        "all(size == 1 or before == after for size, before, after in strides)",
        "all(size == 1 or before or after for size, before, after in strides)",
        ("tests/engine/plan/test_random_plans.py", "tests/engine/nodes/test_operators.py"),
    ),
    Mutant(
        "nodes/a-conversion-to-another-type-is-nothing",
        "escalade/engine/nodes/convert.py",
        "or source.dtype != target.dtype or",
        "or",
        ("tests/engine/plan/test_random_plans.py", "tests/engine/nodes/test_operators.py"),
    ),
    Mutant(
        "nodes/a-conversion-of-layouts-is-nothing",
        "escalade/engine/nodes/convert.py",
        "source.shape[1] == 1 or math.prod(source.shape[2:]) == 1",
        "source.shape[1] == 1 or math.prod(source.shape[2:]) > 1",
        ("tests/engine/plan/test_random_plans.py", "tests/engine/nodes/test_operators.py"),
    ),
    Mutant(
        "nodes/a-normalisation-is-nothing",
        "escalade/engine/nodes/convert.py",
        'if "scale" in node.inputs or source',
        "if source",
        ("tests/engine/test_twin.py",),
    ),
    Mutant(
        "nodes/an-image-in-planes-is-reduced-as-pixels",
        "escalade/engine/nodes/pools.py",
        'if p.layout == "nhwc":\n        return ReduceProblem',
        'if p.layout != "":\n        return ReduceProblem',
        ("tests/engine/test_twin.py",),
    ),
    Mutant(
        "nodes/padding-is-not-part-of-the-window",
        "escalade/engine/nodes/pools.py",
        "size + padding <= kernel for",
        "size <= kernel for",
        ("tests/engine/test_twin.py",),
    ),
    Mutant(
        "nodes/a-product-is-added-whatever-its-factor",
        "escalade/engine/nodes/linear.py",
        'if call("beta", 1) != 1 or call("alpha", 1) != 1 or bias',
        "if bias",
        ("tests/engine/passes/test_computed_weights.py", "tests/engine/nodes/test_operators.py"),
    ),
    Mutant(
        "nodes/a-weight-that-is-not-turned",
        "escalade/engine/nodes/linear.py",
        "weight.t().contiguous()",
        "weight.contiguous()",
        ("tests/engine/passes/test_computed_weights.py", "tests/engine/nodes/test_operators.py"),
    ),
    Mutant(
        "nodes/other-types-of-the-same-bytes-are-views",
        "escalade/engine/nodes/views.py",
        "if call.converts(x, graph):",
        "if False:",
        ("tests/engine/capture/test_export.py", "tests/engine/passes/test_computed_weights.py"),
    ),
    Mutant(
        "nodes/counters-are-not-compared-after-a-second-call",
        CAPTURE + "weights.py",
        "        if unstable:",
        "        if False:",
        ("tests/engine/capture/test_weight_writes.py",),
    ),
    Mutant(
        "nodes/a-graph-grows-with-the-wrong-batch",
        "escalade/engine/graph/graph.py",
        "return leaf.times * batch if",
        "return batch if",
        (
            "tests/engine/test_sizes.py",
            "tests/engine/capture/test_export.py",
            "tests/engine/capture/test_trace.py",
        ),
    ),
    Mutant(
        "nodes/readers-are-not-forgotten",
        "escalade/engine/graph/graph.py",
        "            self.readers[value].pop(name, None)",
        "            pass",
        ("tests/engine/passes/test_passes.py",),
    ),
    Mutant(
        "nodes/removed-results-stay",
        "escalade/engine/graph/graph.py",
        "self.outputs = tuple(new if name == old else name for name in self.outputs)",
        "pass",
        ("tests/engine/passes/test_passes.py",),
    ),
    Mutant(
        "nodes/writes-to-views-are-not-seen",
        CAPTURE + "weights.py",
        "if any(original.overlap(constants[name], constants[other]) for other in read - {name}):",
        "if False:",
        ("tests/engine/capture/test_weight_writes.py",),
    ),
    Mutant(
        "nodes/views-overlap-only-at-their-beginning",
        CAPTURE + "model_copy.py",
        "first <= other_last and other_first <= last",
        "first == other_first",
        ("tests/engine/capture/test_weight_writes.py",),
    ),
    Mutant(
        "nodes/batches-of-one-are-constants",
        CAPTURE + "example_inputs.py",
        "return max(self._batch_size, 2) if self._batch_size else 0",
        "return self._batch_size",
        EXPORT,
    ),
    Mutant(
        "nodes/other-sizes-in-planes",
        CAPTURE + "export.py",
        "return empty(shape, self.dtype, self.layout, self.device)",
        'return empty(shape, self.dtype, "nchw", self.device)',
        ("tests/engine/test_sizes.py",),
    ),
    Mutant(
        "nodes/uneven-zeros-around",
        "escalade/engine/passes/prologues.py",
        "top == bottom >= 0 and left == right >= 0",
        "top == bottom >= 0",
        ("tests/engine/passes/test_padding.py",),
    ),
    Mutant(
        "nodes/pixels-and-padding-counted-alike",
        "escalade/engine/passes/prologues.py",
        'if a["ceil_mode"] or (a["padding"] != (0, 0) and not a["count_padding"]):',
        'if a["ceil_mode"]:',
        ("tests/engine/passes/test_padding.py",),
    ),
    Mutant(
        "nodes/a-mean-with-padding-is-of-pixels",
        "escalade/engine/passes/fuse_pools.py",
        'return not a["divisor"] and (a["padding"] == (0, 0) or not a["count_padding"])',
        'return not a["divisor"]',
        ("tests/engine/passes/test_hoist_pool.py",),
    ),
    Mutant(
        "nodes/columns-of-one-item",
        NODES + "norms.py",
        "return Batch(first.times * number)",
        "return Batch(number)",
        ("tests/engine/nodes/test_softmax.py",),
    ),
    Mutant(
        "nodes/any-constant-around-is-zeros",
        "escalade/engine/passes/prologues.py",
        'a["mode"] == "constant" and a["value"] == 0 and is',
        'a["mode"] == "constant" and is',
        ("tests/engine/passes/test_padding.py",),
    ),
    Mutant(
        "nodes/pieces-begin-where-they-end",
        NODES + "views.py",
        "list(accumulate(sizes, initial=0))[index]",
        "list(accumulate(sizes))[number]",
        ("tests/engine/plan/test_subbuffers.py",),
    ),
)
