"""Mutants of engine files, calls, caches, guards and choices."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ENGINE = "escalade/engine/"
DEVICE = "escalade/device/"
CALLS = (
    "tests/engine/test_calls.py::test_calls_follow_the_strides_of_each_input",
    "tests/engine/test_plans.py",
    "tests/engine/test_calls.py::test_results_where_the_caller_wants_them",
)
FILE = ("tests/engine/test_file.py::test_the_checksum_is_of_names_types_and_sizes_too",)
CARRIED = ("tests/engine/test_carried.py::test_plans_are_for_one_card_and_one_set_of_inputs",)
TWIN = ("tests/device/twin/test_building.py::test_the_key_has_everything_that_a_library_depends_on",)
NVRTC = ("tests/device/test_nvrtc.py",)
CACHE = ("tests/device/cache",)
GUARDS = (
    "tests/ops/calling/test_calls.py::test_words_that_mean_something_else_are_not_taken",
    "tests/engine/test_calls.py::test_calls_follow_the_strides_of_each_input",
)
GRAPH = ("tests/device/test_graph.py", "tests/device/test_arguments.py", "tests/engine/plan/test_program.py")
CHOICE = ("tests/ops/choose",)
STREAMING = ("tests/engine/test_streaming.py", "tests/engine/test_streaming_order.py")


def _of(path: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(f"files/{name}", path, old, new, tests)


MUTANTS: tuple[Mutant, ...] = (
    _of(
        DEVICE + "twin/building.py",
        "twin-key-without-headers",
        "interface_key(), *headers(source))",
        "interface_key())",
        TWIN,
    ),
    _of(
        DEVICE + "twin/building.py",
        "twin-key-without-options",
        "name, repr(options), interface_key()",
        "name, interface_key()",
        TWIN,
    ),
    _of(
        DEVICE + "twin/building.py",
        "headers-of-headers-are-not-read",
        "pending += _INCLUDE.findall(found[name])",
        "pass",
        TWIN,
    ),
    _of(
        DEVICE + "twin/building.py",
        "runtime-key-without-options",
        "*sources, repr(toolchain.runtime_options()))",
        "*sources)",
        TWIN,
    ),
    _of(
        DEVICE + "pytorch.py",
        "a-guard-without-strides",
        "dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors]",
        "dynamic_dims_strides=[[None] * tensor.dim() for tensor in tensors]",
        GUARDS,
    ),
    _of(
        DEVICE + "pytorch.py",
        "a-slow-guard-without-strides",
        "tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device",
        "tuple(tensor.shape), (), tensor.dtype, tensor.device",
        GUARDS,
    ),
    _of(
        ENGINE + "engine.py",
        "a-sight-without-strides",
        "x.device, x.is_contiguous() or x.stride()",
        "x.device",
        CALLS,
    ),
    _of(
        ENGINE + "plans.py",
        "plans-by-size-alone",
        "(tensor.shape, InputFormat.of(tensor), tensor.device)",
        "(tensor.shape, tensor.dim(), tensor.device)",
        CALLS,
    ),
    _of(ENGINE + "plans.py", "dropped-plans-are-seen", "if seen.kept is not gone}", "}", CALLS),
    _of(
        ENGINE + "plans.py",
        "the-last-plan-stays-when-dropped",
        "if seen.kept is not gone}\n        self.last = None",
        "if seen.kept is not gone}",
        CALLS,
    ),
    _of(
        ENGINE + "file.py",
        "a-digest-without-names",
        'f"{name} {tensor.dtype} {tuple(tensor.shape)}"',
        'f"{tensor.dtype} {tuple(tensor.shape)}"',
        FILE,
    ),
    _of(
        ENGINE + "file.py",
        "a-digest-without-types",
        'f"{name} {tensor.dtype} {tuple(tensor.shape)}"',
        'f"{name} {tuple(tensor.shape)}"',
        FILE,
    ),
    _of(
        ENGINE + "file.py",
        "a-digest-without-sizes",
        'f"{name} {tensor.dtype} {tuple(tensor.shape)}"',
        'f"{name} {tensor.dtype}"',
        FILE,
    ),
    _of(
        ENGINE + "file.py",
        "a-digest-without-the-dtype",
        'f"{dtype}\\n{graph}{carried}"',
        'f"{graph}{carried}"',
        FILE,
    ),
    _of(
        ENGINE + "file.py",
        "a-digest-without-what-is-carried",
        'f"{dtype}\\n{graph}{carried}"',
        'f"{dtype}\\n{graph}"',
        ("tests/engine/test_carried.py",),
    ),
    _of(
        ENGINE + "carried.py",
        "plans-of-cards-of-other-sizes",
        "card.name, card.architecture, card.multiprocessors,",
        "card.name, card.architecture, self.multiprocessors,",
        CARRIED,
    ),
    _of(
        ENGINE + "carried.py",
        "plans-of-cards-of-other-names",
        "card.name, card.architecture, card.multiprocessors,",
        "self.card, card.architecture, card.multiprocessors,",
        CARRIED,
    ),
    _of(
        ENGINE + "carried.py",
        "plans-of-other-inputs",
        "if plan.is_for(card) and plan.inputs == plain)",
        "if plan.is_for(card))",
        CARRIED,
    ),
    _of(
        ENGINE + "carried.py",
        "inputs-without-their-layout",
        'removeprefix("torch."), form.layout] for',
        'removeprefix("torch."), ""] for',
        CARRIED,
    ),
    Mutant(
        "files/cubin-key-without-the-compiler",
        "escalade/device/nvrtc.py",
        "        compiler_version(),\n        architecture,\n",
        "        architecture,\n",
        ("tests/device/test_nvrtc.py",),
    ),
    Mutant(
        "files/cubin-key-without-nvidias-headers",
        "escalade/device/nvrtc.py",
        "        header_digest(cuda_headers(), nvidia_includes(program)),\n",
        "",
        ("tests/device/test_nvrtc.py",),
    ),
    Mutant(
        "files/cache-key-parts-run-together",
        "escalade/device/cache.py",
        '        digest.update(len(data).to_bytes(8, "little"))\n',
        "",
        ("tests/device/cache",),
    ),
    Mutant(
        "files/entries-in-use-are-evicted",
        "escalade/device/cache.py",
        ">= self.grace_seconds",
        ">= 0",
        ("tests/device/cache",),
    ),
    Mutant(
        "files/the-newest-entries-go-first",
        "escalade/device/cache.py",
        "key=lambda entry: entry.last_use)",
        "key=lambda entry: -entry.last_use)",
        ("tests/device/cache",),
    ),
    Mutant(
        "files/changes-are-copied-at-every-replay",
        "escalade/device/graph.py",
        "            self._changed.clear()\n",
        "",
        ("tests/device/test_graph.py", "tests/device/test_arguments.py", "tests/engine/plan/test_program.py"),
    ),
    Mutant(
        "files/a-chain-in-no-order",
        "escalade/device/graph.py",
        "behind = nodes[-1].handle if nodes else None",
        "behind = nodes[0].handle if nodes else None",
        ("tests/device/test_graph.py", "tests/device/test_arguments.py", "tests/engine/plan/test_program.py"),
    ),
    Mutant(
        "files/pointers-forget-a-buffers-offset",
        "escalade/device/arguments.py",
        "(value, offset + buffer.offset) for value",
        "(value, offset) for value",
        ("tests/device/test_graph.py", "tests/device/test_arguments.py", "tests/engine/plan/test_program.py"),
    ),
    Mutant(
        "files/an-address-is-kept-although-others-set-it",
        "escalade/device/arguments.py",
        '        """Someone else has set the arguments meanwhile."""\n        self._address = None',
        '        """Someone else has set the arguments meanwhile."""',
        (
            "tests/device/test_graph.py",
            "tests/device/test_arguments.py",
            "tests/engine/plan/test_program.py",
            "tests/ops/calling/test_calls.py",
        ),
    ),
    Mutant(
        "files/the-newest-plan-goes-first",
        "escalade/engine/plans.py",
        "oldest = min(self.kept",
        "oldest = max(self.kept",
        ("tests/engine/test_calls.py", "tests/engine/test_plans.py"),
    ),
    _of(
        "escalade/device/cache.py",
        "damage-is-not-removed",
        "if os.path.samestat(os.lstat(path), damage.status):",
        "if False:",
        ("tests/device/cache/test_damage.py::test_what_is_damaged_is_not_there",),
    ),
    _of(
        "escalade/device/pytorch.py",
        "slow-guards-of-a-tensor-given-twice",
        "len({id(tensor) for tensor in tensors}) < len(tensors)",
        "len(tensors) < 0",
        ("tests/ops/calling/test_calls.py::test_the_short_way_asks_for_what_pytorch_has",),
    ),
    _of(
        "escalade/device/arguments.py",
        "tensor-maps-are-not-encoded-again",
        "        self._encoded = {}\n        self.forget()\n",
        "        self.forget()\n",
        ("tests/device/test_arguments.py",),
    ),
    _of(
        "escalade/engine/calls.py",
        "a-stream-does-not-wait-for-another",
        "current.wait_event(self._done.event)",
        "pass",
        ("tests/engine/test_streaming_order.py::test_calls_on_several_streams_share_the_buffers_of_a_plan",),
    ),
    _of(
        "escalade/ops/choose/choice.py",
        "rungs-that-failed-are-chosen-again",
        'if f"{operation.name}/{name}" in avoid:',
        "if name in avoid:",
        ("tests/ops/choose/test_choice.py::test_what_failed_before_is_passed_over",),
    ),
    _of(
        "escalade/ops/choose/choice.py",
        "conversions-cost-nothing",
        "        if us + conversion < least:\n            least = us + conversion",
        "        if us < least:\n            least = us",
        ("tests/ops/choose/test_choice.py::test_an_estimate_includes_the_conversions",),
    ),
    _of(
        "escalade/ops/choose/choice.py",
        "a-rungs-refusal-of-a-measured-problem",
        "        if rung.refusal(problem) is not None:\n            continue\n        for config",
        "        for config",
        ("tests/ops/choose/test_choice.py::test_a_rung_that_refuses_the_problem_is_not_taken_from_a_table",),
    ),
    _of(
        "escalade/ops/choose/table.py",
        "tables-without-the-layout",
        '{problem.dtype} {problem.layout}"',
        '{problem.dtype}"',
        ("tests/ops/choose/test_table.py::test_other_dtypes_layouts_and_operations_do_not_match",),
    ),
    _of(
        "escalade/ops/choose/table.py",
        "tables-are-not-read-again",
        "_read_at(path, origin, (status.st_mtime_ns, status.st_ino, status.st_size))",
        "_read_at(path, origin, ())",
        ("tests/ops/choose/test_table.py::test_a_table_that_changes_is_read_again",),
    ),
    _of(
        "escalade/ops/calling/executables.py",
        "executables-whatever-the-rung",
        "key = (operation, problem, rung, device)",
        "key = (operation, problem, device)",
        (
            "tests/ops/calling/test_calls.py::test_executables_are_made_ready_once_for_each_operation_problem_rung_and_device",
        ),
    ),
    _of(
        "escalade/ops/calling/call.py",
        "workspaces-on-top-of-each-other",
        "        end += -(-room.bytes // _ROOM_ALIGNMENT) * _ROOM_ALIGNMENT",
        "        end = -(-room.bytes // _ROOM_ALIGNMENT) * _ROOM_ALIGNMENT",
        ("tests/ops/calling/test_calls.py::test_workspaces_of_a_call_do_not_overlap",),
    ),
    _of(
        "escalade/ops/calling/call.py",
        "unaligned-arguments-as-they-are",
        "name: _aligned(arguments[place] if lay is None else lay(arguments[place]))",
        "name: (arguments[place] if lay is None else lay(arguments[place]))",
        ("tests/ops/test_alignment.py::test_kernels_are_given_aligned_memory",),
    ),
    _of(
        "escalade/ops/calling/operator.py",
        "kinds-without-strides",
        "(one.shape, one.stride(), one.dtype, one.device) for one",
        "(one.shape, one.dtype, one.device) for one",
        ("tests/ops/calling/test_calls.py::test_a_call_again_gives_what_the_first_would",),
    ),
    _of(
        "escalade/engine/streaming.py",
        "results-are-the-slots-memory",
        "[result.clone() for result in self._made.tensors]",
        "self._made.tensors",
        ("tests/engine/test_streaming_order.py::test_a_slot_waits_for_each_of_its_streams",),
    ),
    _of(
        "escalade/engine/streaming.py",
        "a-slot-is-free-before-its-results",
        "            made = slots[number].receive()\n            feeder.free.put(number)",
        "            feeder.free.put(number)\n            made = slots[number].receive()",
        ("tests/engine/test_streaming.py::test_results_come_in_order_for_batches_of_any_size",),
    ),
    _of(
        "escalade/engine/streaming.py",
        "batches-are-not-copied",
        "self._given = _staged(_tensors(self._engine, batch), self._staging)",
        "self._given = list(_tensors(self._engine, batch))",
        ("tests/engine/test_streaming.py::test_a_producer_may_fill_the_same_memory_again",),
    ),
    _of(
        "escalade/engine/streaming.py",
        "compute-does-not-wait-for-copies",
        "            lanes.compute.wait_event(self._arrived)\n",
        "",
        ("tests/engine/test_streaming_order.py::test_a_slot_waits_for_each_of_its_streams",),
    ),
    _of(
        "escalade/engine/streaming.py",
        "copies-back-do-not-wait-for-compute",
        "            lanes.outward.wait_event(self._computed)\n",
        "",
        ("tests/engine/test_streaming_order.py::test_a_slot_waits_for_each_of_its_streams",),
    ),
    _of(
        "escalade/device/cache.py",
        "entries-repaired-meanwhile-are-removed",
        "if os.path.samestat(os.lstat(path), damage.status):",
        "if os.lstat(path):",
        ("tests/device/cache/test_damage.py::test_an_entry_that_was_repaired_meanwhile_stays",),
    ),
    _of(
        "escalade/engine/file.py",
        "shared-weights-become-two",
        "constants={name: moved[id(tensor)] for",
        "constants={name: tensor.to(device) for",
        ("tests/engine/test_file.py::test_shared_weights_are_moved_once",),
    ),
)
