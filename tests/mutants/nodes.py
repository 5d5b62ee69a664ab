"""Mutants of graph operators, of what they become, and of capturing."""

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
        "slice.py", "a-range-with-a-step-is-a-range", 'if call("step", 1) == 1 else None', "if True else None"
    ),
    _of("slice.py", "ranges-from-the-end-begin-at-it", "start + whole if start < 0 else start", "start"),
    _of("slice.py", "pieces-of-the-size-of-the-last", '-(-whole // call("chunks", 1))', "own"),
    _of(
        "slice.py",
        "rows-cut-at-the-other-end",
        "fewer = (-first, first + left - form.shape[at])",
        "fewer = (first + left - form.shape[at], -first)",
        OPERATORS,
        "tests/engine/plan/test_parts.py",
    ),
    _of(
        "slice.py",
        "columns-are-cut-as-rows",
        "if at == 2 else (0, 0, *fewer)",
        "if at >= 2 else (0, 0, *fewer)",
        OPERATORS,
        "tests/engine/plan/test_parts.py",
    ),
    _of(
        "permute.py",
        "permutes-in-a-row-the-other-way",
        'tuple(before.attributes["order"][dim] for dim in order)',
        'tuple(order[dim] for dim in before.attributes["order"])',
        RANDOM,
        OPERATORS,
        "tests/engine/capture/test_export.py",
    ),
    _of(
        "permute.py",
        "permutes-of-any-strides-are-nothing",
        "all(size == 1 or before == after for size, before, after in steps)",
        "all(size == 1 or before or after for size, before, after in steps)",
    ),
    _of("convert.py", "a-conversion-to-another-type-is-nothing", "or source.dtype != target.dtype or", "or"),
    _of(
        "convert.py",
        "a-conversion-of-layouts-is-nothing",
        "source.shape[1] == 1 or math.prod(source.shape[2:]) == 1",
        "source.shape[1] == 1 or math.prod(source.shape[2:]) > 1",
    ),
    _of(
        "convert.py",
        "a-normalisation-is-nothing",
        'if "scale" in node.inputs or source',
        "if source",
        OPERATORS,
        "tests/engine/nodes/test_stem.py",
        "tests/engine/test_twin.py",
    ),
    _of(
        "max_pool2d.py",
        "an-image-in-planes-is-reduced-as-pixels",
        'if p.layout == "nhwc":\n        return ReduceProblem',
        'if p.layout != "":\n        return ReduceProblem',
        "tests/engine/nodes/test_reduce.py",
        OPERATORS,
    ),
    _of(
        "max_pool2d.py",
        "padding-is-not-part-of-the-window",
        "size + padding <= kernel\n",
        "size <= kernel\n",
        "tests/engine/nodes/test_reduce.py",
        OPERATORS,
    ),
    _of(
        "linear.py",
        "a-product-is-added-whatever-its-factor",
        'if call("beta", 1) != 1 or call("alpha", 1) != 1 or bias',
        "if bias",
        "tests/engine/passes/test_computed_weights.py",
        OPERATORS,
    ),
    _of(
        "linear.py",
        "a-weight-that-is-not-turned",
        "weight.t().contiguous()",
        "weight.contiguous()",
        "tests/engine/passes/test_computed_weights.py",
        OPERATORS,
    ),
    _of(
        "reshape.py",
        "other-types-of-the-same-bytes-are-views",
        'if call("dtype") is not None:',
        "if False:",
        "tests/engine/capture/test_export.py",
        "tests/engine/passes/test_computed_weights.py",
    ),
    Mutant(
        "nodes/counters-are-not-compared-after-a-second-call",
        CAPTURE + "state.py",
        "if moved or _shared(graph, before):",
        "if _shared(graph, before):",
        ("tests/engine/capture/test_state.py",),
    ),
    Mutant(
        "nodes/writes-to-shared-memory-are-not-seen",
        CAPTURE + "state.py",
        "if moved or _shared(graph, before):",
        "if moved:",
        ("tests/engine/capture/test_state.py",),
    ),
    Mutant(
        "nodes/batches-of-one-are-constants",
        CAPTURE + "given.py",
        "return max(self._items, 2) if self._items else 0",
        "return self._items",
        EXPORT,
    ),
    Mutant(
        "nodes/examples-in-planes-for-channels-last",
        CAPTURE + "sizes.py",
        "torch.channels_last) if self.is_channels_last else tensor",
        "torch.channels_last) if False else tensor",
        ("tests/engine/test_sizes.py",),
    ),
    Mutant(
        "nodes/a-graph-grows-with-the-wrong-batch",
        "escalade/engine/graph/graph.py",
        "return leaf.times * batch if",
        "return batch if",
        ("tests/engine/test_sizes.py", *EXPORT),
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
)
