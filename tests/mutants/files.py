"""Mutants of engine files, calls, caches, guards and choices."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ENGINE = "escalade/engine/"
DEVICE = "escalade/device/"
CALLS = ("tests/engine/test_calls.py", "tests/engine/test_plans.py")
FILE = ("tests/engine/test_file.py",)
CARRIED = ("tests/engine/test_carried.py",)
TWIN = ("tests/device/twin/test_building.py",)
NVRTC = ("tests/device/test_nvrtc.py",)
CACHE = ("tests/device/cache",)
GUARDS = ("tests/ops/calling/test_calls.py", "tests/engine/test_calls.py")
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
        DEVICE + "nvrtc.py",
        "cubin-key-without-the-compiler",
        "        compiler_version(),\n        architecture,\n",
        "        architecture,\n",
        NVRTC,
    ),
    _of(
        DEVICE + "nvrtc.py",
        "cubin-key-without-nvidias-headers",
        "        header_digest(cuda_headers(), nvidia_includes(program)),\n",
        "",
        NVRTC,
    ),
    _of(
        DEVICE + "cache.py",
        "cache-key-parts-run-together",
        '        digest.update(len(data).to_bytes(8, "little"))\n',
        "",
        CACHE,
    ),
    _of(
        DEVICE + "cache.py",
        "damage-is-not-removed",
        "if os.path.samestat(os.lstat(path), damage.status):",
        "if False:",
        CACHE,
    ),
    _of(DEVICE + "cache.py", "entries-in-use-are-evicted", ">= self.grace_seconds", ">= 0", CACHE),
    _of(
        DEVICE + "cache.py",
        "the-newest-entries-go-first",
        "key=lambda entry: entry.last_use)",
        "key=lambda entry: -entry.last_use)",
        CACHE,
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
        DEVICE + "pytorch.py",
        "a-guard-of-the-first-tensor",
        "len({id(tensor) for tensor in tensors}) < len(tensors)",
        "len(tensors) < 0",
        GUARDS,
    ),
    _of(
        DEVICE + "graph.py",
        "changes-are-copied-at-every-replay",
        "            self._changed.clear()\n",
        "",
        GRAPH,
    ),
    _of(
        DEVICE + "graph.py",
        "a-chain-in-no-order",
        "behind = nodes[-1].handle if nodes else None",
        "behind = nodes[0].handle if nodes else None",
        GRAPH,
    ),
    _of(
        DEVICE + "arguments.py",
        "pointers-forget-a-buffers-offset",
        "(value, offset + buffer.offset) for value",
        "(value, offset) for value",
        GRAPH,
    ),
    _of(
        DEVICE + "arguments.py",
        "tensor-maps-are-not-encoded-again",
        "        self._encoded = {}\n        self.forget()\n",
        "        self.forget()\n",
        GRAPH,
    ),
    _of(
        DEVICE + "arguments.py",
        "an-address-is-kept-although-others-set-it",
        '        """Someone else has set the arguments meanwhile."""\n        self._address = None',
        '        """Someone else has set the arguments meanwhile."""',
        (*GRAPH, "tests/ops/calling/test_calls.py"),
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
        ENGINE + "plans.py",
        "the-newest-plan-goes-first",
        "oldest = min(self.kept",
        "oldest = max(self.kept",
        CALLS,
    ),
    _of(
        ENGINE + "calls.py",
        "results-over-inputs-in-direct-calls",
        "made.within(room) if is_apart(room, tensors) else made.make()",
        "made.within(room)",
        CALLS,
    ),
    _of(
        ENGINE + "calls.py",
        "a-stream-does-not-wait-for-another",
        "current.wait_event(self._done.event)",
        "pass",
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
        CARRIED,
    ),
    _of(ENGINE + "file.py", "shared-weights-become-two", "if id(tensor) not in moved:", "if True:", FILE),
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
    _of(
        "escalade/ops/choose/choice.py",
        "rungs-that-failed-are-chosen-again",
        'if f"{operation.name}/{name}" in avoid:',
        "if name in avoid:",
        CHOICE,
    ),
    _of(
        "escalade/ops/choose/choice.py",
        "conversions-cost-nothing",
        "        if us + conversion < least:\n            least = us + conversion",
        "        if us < least:\n            least = us",
        CHOICE,
    ),
    _of(
        "escalade/ops/choose/choice.py",
        "a-rungs-refusal-of-a-measured-problem",
        "        if rung.refusal(problem) is not None:\n            continue\n        for config",
        "        for config",
        CHOICE,
    ),
    _of(
        "escalade/ops/choose/table.py",
        "tables-without-the-layout",
        '{problem.dtype} {problem.layout}"',
        '{problem.dtype}"',
        CHOICE,
    ),
    _of(
        "escalade/ops/choose/table.py",
        "tables-are-not-read-again",
        "_read_at(path, origin, (status.st_mtime_ns, status.st_ino, status.st_size))",
        "_read_at(path, origin, ())",
        CHOICE,
    ),
    _of(
        "escalade/ops/calling/executables.py",
        "executables-whatever-the-rung",
        "key = (operation, problem, rung, device)",
        "key = (operation, problem, device)",
        ("tests/ops/calling",),
    ),
    _of(
        "escalade/ops/calling/call.py",
        "workspaces-on-top-of-each-other",
        "        end += -(-room.bytes // _ROOM_ALIGNMENT) * _ROOM_ALIGNMENT",
        "        end = -(-room.bytes // _ROOM_ALIGNMENT) * _ROOM_ALIGNMENT",
        ("tests/ops/calling",),
    ),
    _of(
        "escalade/ops/calling/call.py",
        "unaligned-arguments-as-they-are",
        "name: _aligned(arguments[place] if lay is None else lay(arguments[place]))",
        "name: (arguments[place] if lay is None else lay(arguments[place]))",
        ("tests/ops/calling", "tests/ops/test_alignment.py"),
    ),
    _of(
        "escalade/ops/calling/operator.py",
        "kinds-without-strides",
        "(one.shape, one.stride(), one.dtype, one.device) for one",
        "(one.shape, one.dtype, one.device) for one",
        ("tests/ops/calling",),
    ),
    _of(
        ENGINE + "streaming.py",
        "results-are-the-slots-memory",
        "[result.clone() for result in self._made.tensors]",
        "self._made.tensors",
        STREAMING,
    ),
    _of(
        ENGINE + "streaming.py",
        "a-slot-is-free-before-its-results",
        "            made = slots[number].receive()\n            feeder.free.put(number)",
        "            feeder.free.put(number)\n            made = slots[number].receive()",
        STREAMING,
    ),
    _of(
        ENGINE + "streaming.py",
        "batches-are-not-copied",
        "self._given = _staged(_tensors(self._engine, batch), self._staging)",
        "self._given = list(_tensors(self._engine, batch))",
        STREAMING,
    ),
    _of(
        ENGINE + "streaming.py",
        "compute-does-not-wait-for-copies",
        "            lanes.compute.wait_event(self._arrived)\n",
        "",
        STREAMING,
    ),
    _of(
        ENGINE + "streaming.py",
        "copies-back-do-not-wait-for-compute",
        "            lanes.outward.wait_event(self._computed)\n",
        "",
        STREAMING,
    ),
)
