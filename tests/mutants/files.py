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
)
