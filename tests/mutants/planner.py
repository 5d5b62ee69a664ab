"""Mutants of the engine's planner and of a plan's memory."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLAN = "escalade/engine/plan/"
TESTS = "tests/engine/plan/"
RANDOM = TESTS + "test_random_plans.py"
PARTS = TESTS + "test_subbuffers.py"
LIVES = (RANDOM, TESTS + "test_plan.py")
ARENA = (TESTS + "test_arena.py",)
CONSTANTS = (TESTS + "test_constants.py",)


def _lives(name: str, old: str, new: str) -> Mutant:
    return Mutant(f"planner/{name}", PLAN + "liveness.py", old, new, LIVES)


def _parts(name: str, old: str, new: str) -> Mutant:
    return Mutant(f"planner/{name}", PLAN + "subbuffers.py", old, new, (RANDOM, PARTS))


MUTANTS: tuple[Mutant, ...] = (
    _lives(
        "a-view-does-not-extend-its-source",
        "last[name] = max(last[name], last[step.node.name])",
        "last[name] = max(last[name], 0)",
    ),
    _lives(
        "a-whole-dies-with-its-first-part",
        "live_until[root] = max(live_until.get(root, -1), last[name], last[root])",
        "live_until[root] = live_until.get(root, last[name])",
    ),
    _lives(
        "a-whole-dies-with-its-last-part",
        "live_until[root] = max(live_until.get(root, -1), last[name], last[root])",
        "live_until[root] = max(live_until.get(root, -1), last[name])",
    ),
    _lives(
        "a-whole-begins-behind-its-parts",
        "first[root] = min(first.get(root, end), made_at[name], made_at.get(root, end))",
        "first[root] = made_at.get(root, end)",
    ),
    _lives("outputs-die-with-their-readers", "last[name] = end", "last.setdefault(name, end)"),
    _lives("in-place-while-others-read", "and live_until[root] == number", "and live_until[root] >= number"),
    _lives("in-place-over-an-input", "and root not in inputs\n", "\n"),
    _lives("in-place-over-rows-apart", "and not forms[candidate].pitch", ""),
    _lives("in-place-of-what-is-read-twice", ".count(candidate) == 1", ".count(candidate) >= 1"),
    _lives(
        "an-alias-does-not-extend-its-owner",
        "max(live_until[root], last[name], live_until.pop(name, -1))",
        "max(live_until[root], live_until.pop(name, -1))",
    ),
    _lives(
        "offsets-in-elements",
        "layout.subbuffers[name].offset * layout.forms[name].dtype.itemsize",
        "layout.subbuffers[name].offset * 4",
    ),
    _lives("two-results-in-one-tensor", "results[root] > 1", "results[root] > 2"),
    _lives(
        "a-part-is-taken-for-the-result",
        "if as_returned and forms[root].bytes == forms[name].bytes:",
        "if as_returned:",
    ),
    _lives("workspaces-live-at-the-first-step", "workspace.bytes, number, number)", "workspace.bytes, 0, 0)"),
    Mutant(
        "planner/lifetimes-meet-without-their-ends",
        PLAN + "plan.py",
        "self.first <= other.last and other.first <= self.last",
        "self.first < other.last and other.first < self.last",
        ARENA,
    ),
    Mutant(
        "planner/a-small-neighbour-resets-the-start",
        PLAN + "liveness.py",
        "start = max(start, high)",
        "start = high",
        ARENA,
    ),
    Mutant(
        "planner/a-gap-one-byte-short",
        PLAN + "liveness.py",
        "if start + size <= low:",
        "if start + value.bytes <= low + 1:",
        ARENA,
    ),
    Mutant(
        "planner/constants-shared-whatever-their-strides",
        PLAN + "constants.py",
        "tensor.stride(), tensor.dtype",
        "tensor.dtype",
        CONSTANTS,
    ),
    Mutant(
        "planner/constants-shared-by-value",
        PLAN + "constants.py",
        "torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))",
        "torch.equal(one, other)",
        CONSTANTS,
    ),
    Mutant(
        "planner/constants-of-one-form-for-all",
        PLAN + "constants.py",
        "if entry.form not in made:",
        "if not made:",
        CONSTANTS,
    ),
    Mutant(
        "planner/counters-shared-between-programs",
        PLAN + "memory.py",
        "if name in packed and not each.zeroed",
        "if name in packed",
        CONSTANTS,
    ),
    Mutant(
        "planner/a-step-overwrites-what-it-reads-in-pytorch",
        PLAN + "memory.py",
        "self._pytorch_owned[name] = own.clone() if unexpected else own",
        "self._pytorch_owned[name] = own",
        (TESTS + "test_values.py",),
    ),
    Mutant(
        "planner/unaligned-values-for-kernels",
        PLAN + "memory.py",
        "and value.dtype is form.dtype and is_aligned(value)",
        "and value.dtype is form.dtype",
        (TESTS + "test_values.py",),
    ),
    Mutant(
        "planner/values-let-go-too-early",
        PLAN + "memory.py",
        "self._release_after.setdefault(last, [])",
        "self._release_after.setdefault(last - 1, [])",
        (RANDOM, TESTS + "test_values.py"),
    ),
    Mutant(
        "planner/views-kept-when-the-arena-moves",
        PLAN + "memory.py",
        "        self.arena = arena\n        self._views = {}\n\n    @property",
        "        self.arena = arena\n\n    @property",
        (TESTS + "test_values.py", TESTS + "test_program.py"),
    ),
    _parts("a-part-forgets-where-its-whole-lies", "parent.offset + offset", "offset"),
    Mutant(
        "planner/results-over-the-inputs-they-are-of",
        PLAN + "kernel_program.py",
        "if is_disjoint(wanted[name], tensors) else each.allocate()",
        "",
        ("tests/engine/test_calls.py",),
    ),
    Mutant(
        "planner/results-over-inputs-in-direct-calls",
        "escalade/engine/calls.py",
        "output.bind(tensor) if is_disjoint(tensor, tensors) else output.allocate()",
        "output.bind(tensor)",
        ("tests/engine/test_calls.py",),
    ),
    Mutant(
        "planner/a-value-lies-in-two-wholes",
        "escalade/engine/plan/subbuffers.py",
        "if producer is None or name in self.within:",
        "if producer is None:",
        ("tests/engine/plan/test_random_plans.py", "tests/engine/plan/test_subbuffers.py"),
    ),
    Mutant(
        "planner/copies-gathered-although-read-before",
        "escalade/engine/plan/subbuffers.py",
        "if not copies or is_read_before or",
        "if not copies or",
        ("tests/engine/plan/test_random_plans.py", "tests/engine/plan/test_subbuffers.py"),
    ),
    Mutant(
        "planner/readers-of-a-part-are-not-asked",
        "escalade/engine/plan/subbuffers.py",
        "return self._accepts(producer, RESULT, name, subbuffer) and all(",
        "return self._accepts(producer, RESULT, name, subbuffer) or all(",
        ("tests/engine/plan/test_random_plans.py", "tests/engine/plan/test_subbuffers.py"),
    ),
    Mutant(
        "planner/rows-of-outer-dimensions",
        "escalade/engine/plan/subbuffers.py",
        "order[: order.index(dimension)]) == 1",
        "order[: order.index(dimension)]) >= 1",
        ("tests/engine/plan/test_random_plans.py", "tests/engine/plan/test_subbuffers.py"),
    ),
    Mutant(
        "planner/reversed-bytes-are-as-they-lie",
        "escalade/engine/plan/moves.py",
        "or moves[0].reversed or",
        "or",
        ("tests/engine/plan/test_random_plans.py", "tests/engine/plan/test_moves.py"),
    ),
    Mutant(
        "planner/strides-of-moves-unchecked",
        "escalade/engine/plan/moves.py",
        "size == 1 or before == after for",
        "True or size for",
        ("tests/engine/plan/test_random_plans.py", "tests/engine/plan/test_moves.py"),
    ),
    Mutant(
        "planner/another-input-type-is-read-as-it-is",
        "escalade/engine/plan/io_binding.py",
        "if tensor.dtype is not self._dtype or not",
        "if not",
        ("tests/engine/plan/test_program.py", "tests/engine/test_calls.py"),
    ),
    Mutant(
        "planner/unaligned-inputs-are-read-as-they-are",
        "escalade/engine/plan/io_binding.py",
        "if not address % ALIGNMENT and (self._matches_last(tensor)",
        "if (self._matches_last(tensor)",
        ("tests/engine/plan/test_program.py", "tests/engine/test_calls.py"),
    ),
    Mutant(
        "planner/results-in-rooms-of-other-strides",
        "escalade/engine/plan/io_binding.py",
        "            and out.stride() == self._strides\n",
        "",
        ("tests/engine/plan/test_program.py", "tests/engine/test_calls.py"),
    ),
    Mutant(
        "planner/apart-on-the-counters-of-others",
        "escalade/engine/plan/kernel_program.py",
        "self._memory.persistent = {**self._memory.persistent, **fresh}",
        "del fresh",
        ("tests/engine/plan/test_program.py", "tests/engine/test_calls.py"),
    ),
    _parts(
        "parts-of-other-layouts-in-place",
        "(self.forms[name].dtype, self.forms[name].layout) == (form.dtype, form.layout)",
        "self.forms[name].dtype == form.dtype",
    ),
    _parts("a-run-begins-at-the-first-member", "for name in members[:start])", "for name in members[:0])"),
    _parts(
        "unaligned-places-for-wide-accesses",
        "if any(number * size % VECTOR_BYTES for number in (subbuffer.offset, subbuffer.pitch)):",
        "if False:",
    ),
    _parts(
        "pieces-of-an-input-are-copied-one-by-one",
        "if reached == parent:",
        "if reached == parent and span.parent in self.graph.nodes:",
    ),
    Mutant(
        "planner/negated-inputs-are-read-as-they-are",
        PLAN + "io_binding.py",
        "or not self._is_packed(tensor) or FAST_PATHS.is_negative(tensor):",
        "or not self._is_packed(tensor):",
        (TESTS + "test_program.py",),
    ),
    Mutant(
        "planner/side-results-begin-at-their-own-step",
        PLAN + "liveness.py",
        "step.node.name: made_at[step.side_output.node]",
        "step.node.name: made_at[step.node.name]",
        ("tests/engine/passes/test_fuse_max_pool.py",),
    ),
    Mutant(
        "planner/a-view-has-bytes-of-its-own",
        PLAN + "liveness.py",
        "last[name], live_until.pop(name, -1))",
        "last[name])",
        (PARTS,),
    ),
    Mutant(
        "planner/results-of-pytorch-lie-apart",
        PLAN + "liveness.py",
        "not_in_arena = (in_pytorch - in_arena) | bound",
        "not_in_arena = in_pytorch | bound",
        LIVES,
    ),
    Mutant(
        "planner/kernels-behind-pytorch-write-outside",
        PLAN + "liveness.py",
        "if step.in_pytorch or not liveness.pytorch_owned.keys().isdisjoint(step.node.inputs.values())",
        "if step.in_pytorch",
        (RANDOM, TESTS + "test_plan.py", TESTS + "test_program.py", "tests/engine/test_calls.py"),
    ),
    Mutant(
        "planner/returned-doubles-in-the-plans-type",
        PLAN + "constants.py",
        "(entry.form == OWN and tensor.dtype is torch.float64)",
        "False",
        ("tests/engine/test_double.py",),
    ),
)
