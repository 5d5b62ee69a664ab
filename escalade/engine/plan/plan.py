"""The plan of a network for one batch size: which kernels run, over which bytes of one arena.

All of it is known before anything runs. Steps read and write values in the arena; weights lie outside it,
packed once into the form that the chosen kernels want.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import torch

from escalade.device.program import Program
from escalade.device.recipe import Recipe, Workspace
from escalade.engine.graph.forms import STORAGE, Form, InputFormat
from escalade.engine.graph.graph import Graph, Input, Node
from escalade.engine.nodes import operator_of, stored_forms
from escalade.engine.nodes.lowering import FP8, FP32, STORED, Beside, Forms, Lowered
from escalade.engine.passes.fusion_level import FusionLevel
from escalade.engine.plan.arena import Arena, Lifetime, assign
from escalade.engine.plan.parts import RESULT, Parts, arrange
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card, Place
from escalade.ops.base.problem import Problem
from escalade.ops.choose.choice import Choice, choose
from escalade.ops.choose.pytorch import reason_for_pytorch
from escalade.ops.choose.table import Table

MOST_DIRECT_LAUNCHES = 3
"""Launches up to which launching kernels one by one costs the host no more than a CUDA graph with copies before and
after it."""


@dataclass(frozen=True)
class ConstantForm:
    """A constant as one kind of kernel wants it."""

    name: str
    form: str


@dataclass(frozen=True)
class Step:
    """A node, and who does it: a rung of a ladder, PyTorch, or nobody where the result is there already."""

    node: Node
    lowered: Lowered | None = None
    choice: Choice | None = None
    recipe: Recipe | None = None
    is_alias: bool = False
    """Whether the result is its input's bytes, seen differently."""
    beside: Beside | None = None
    """Whose kernels write the result beside their own."""
    why_pytorch: str = ""
    """Why PyTorch does it although a rung could."""

    @property
    def runs(self) -> bool:
        """Whether there is anything to be done for it."""
        return not self.is_alias and self.beside is None

    @property
    def in_pytorch(self) -> bool:
        return self.lowered is None and self.runs

    def constant(self, role: str) -> ConstantForm:
        """The constant of that role in the form in which the step takes it."""
        operator = operator_of(self.node)
        forms = self.lowered.constants if self.lowered else operator.constants_in_pytorch(self.node)
        return ConstantForm(self.node.inputs[role], forms.get(role, STORED))

    def has_weights_ready(self, constants: Collection[str]) -> bool:
        """Whether its weights, which are all that it reads besides values, were there before the plan began: then its
        kernels need not wait for the step in front to read them.
        """
        values = operator_of(self.node).values
        return all(name in constants for role, name in self.node.inputs.items() if role not in values)

    def workspace_name(self, workspace: Workspace) -> str:
        return f"{self.node.name}/{workspace.name}"


@dataclass(frozen=True)
class Plan:
    """What a network does for one batch size."""

    dtype: str
    graph: Graph
    """The graph with every size a number."""
    steps: tuple[Step, ...]
    forms: Mapping[str, Form]
    places: Mapping[str, int]
    """The offset of every value and of every workspace that a step uses only while it runs. Values that are outside
    follow behind the arena, for runs over memory of the plan's own."""
    arena_bytes: int
    """Bytes of all that lies inside."""
    lifetimes: tuple[Lifetime, ...]
    """When each value and workspace inside is alive, in steps from 0 on: inputs from -1, outputs to behind the last."""
    lasting: Mapping[str, Workspace]
    """Workspaces that are written once, and counters: they keep what they hold from call to call."""
    constants: tuple[ConstantForm, ...]
    outside: Mapping[str, str]
    """Values that lie in the caller's tensors instead of the arena: the input or output whose bytes each has. Kernels
    read inputs where they are and write results where they are wanted."""
    outside_bytes: int
    apart: Mapping[str, int]
    """Values of PyTorch's steps, which lie where PyTorch puts them, and their views: the last step at which each
    matters. Outputs are not among them."""
    chosen: Mapping[tuple[str, Problem], Choice]
    """What was chosen by operation and problem, every value by itself; also for what PyTorch does after all."""

    @property
    def batch(self) -> int:
        """The size of the first input's first dimension, if it has one."""
        batch = self.graph.inputs[0].shape[0] if self.graph.inputs and self.graph.inputs[0].shape else 1
        assert isinstance(batch, int)
        return batch

    @property
    def is_direct(self) -> bool:
        """Whether a call is a few launches over nothing but the caller's tensors and scratch memory."""
        read, written = len(self.inputs_outside), len(self.outputs_outside)
        all_outside = (read, written) == (len(self.graph.inputs), len(self.graph.outputs))
        return all_outside and _are_few_launches(self.steps)

    @property
    def inputs_outside(self) -> tuple[str, ...]:
        """The inputs that are read where the caller has them; the others are copied into the arena."""
        return tuple(given.name for given in self.graph.inputs if given.name in self.outside)

    @property
    def outputs_outside(self) -> tuple[str, ...]:
        """The outputs that are written where the caller gets them; the others are copied there."""
        return tuple(name for name in self.graph.outputs if name in self.outside)

    def beside(self, name: str) -> Mapping[str, str]:
        """The values that a node's kernels write beside its own, by the buffers that they are there."""
        return self._beside.get(name, {})

    @cached_property
    def _beside(self) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {}
        for step in self.steps:
            if step.beside is not None:
                found.setdefault(step.beside.node, {})[step.beside.buffer] = step.node.name
        return found

    @property
    def programs(self) -> tuple[Program, ...]:
        """What its kernels are compiled of."""
        recipes = (step.recipe for step in self.steps if step.recipe)
        return tuple(dict.fromkeys(program for recipe in recipes for program in recipe.programs))

    @property
    def fallbacks(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.in_pytorch)

    @property
    def constant_bytes(self) -> int:
        sizes = {FP32: 4, FP8: 1}
        storage = STORAGE[self.dtype].itemsize
        return sum(
            self.graph.constants[entry.name].numel() * sizes.get(entry.form, storage)
            for entry in self.constants
        )

    @property
    def lasting_bytes(self) -> int:
        return sum(workspace.bytes for workspace in self.lasting.values())

    @property
    def bytes(self) -> int:
        """All the memory that a call uses, its inputs and results included, PyTorch's own steps apart."""
        return self.arena_bytes + self.outside_bytes + self.constant_bytes + self.lasting_bytes


def make_plan(
    graph: Graph,
    dtype: str,
    place: Place,
    formats: Mapping[str, InputFormat],
    avoid: frozenset[str] = frozenset(),
    fusion: FusionLevel = FusionLevel.fused,
    in_pytorch: Mapping[str, str] = MappingProxyType({}),
    bound: bool = False,
    decided: Table | None = None,
    deterministic: bool = False,
) -> Plan:
    """Kernels for every node of a graph whose sizes are numbers, and a place for every value.

    `in_pytorch` names nodes that PyTorch is to do although a rung could, with the reason. Where inputs are `bound`,
    they lie in tensors that are the same at every run, and have no place here. `decided` has choices that were made
    before. In a `deterministic` plan PyTorch adds up nothing: it may choose another way for it at each run.
    """
    dense = value_forms(graph, dtype, formats)
    asking = Forms(dtype, dense, graph.constants, graph.typed)
    choices = _Choices(graph.nodes, asking, place, avoid, fusion, in_pytorch, decided, deterministic)
    parts = arrange(graph, dense, asking, choices.takes, lambda node: choices.of(node).in_pytorch)
    graph, forms = parts.graph, parts.forms
    steps = _with_makers([_step(node, parts, choices) for node in graph])
    if deterministic:
        _require_kernels(steps)
    constants = dict.fromkeys(
        step.constant(role)
        for step in steps
        for role, name in step.node.inputs.items()
        if name in graph.constants
    ) | dict.fromkeys(ConstantForm(name, STORED) for name in graph.outputs if name in graph.constants)
    lasting = {
        step.workspace_name(workspace): workspace
        for step in steps
        if step.recipe
        for workspace in step.recipe.lasting
        if workspace.zeroed or step.has_weights_ready(graph.constants)
    }
    values = _Values.of(graph, steps, parts, frozenset(one.name for one in graph.inputs if bound))
    outside = {} if bound else _outside(graph, steps, values, forms)
    inner, outer = _arenas(steps, values, forms, lasting, outside)
    roots = {**inner.offsets, **{name: inner.bytes + offset for name, offset in outer.offsets.items()}}
    aliases = {
        name: roots[values.root(name)] + values.offset(name, parts)
        for name in values.owner
        if name not in values.apart
    }
    return Plan(
        dtype,
        graph,
        tuple(steps),
        forms,
        {**roots, **aliases},
        inner.bytes,
        inner.lifetimes,
        lasting,
        tuple(constants),
        outside,
        outer.bytes,
        values.apart,
        choices.chosen,
    )


def _with_makers(steps: Sequence[Step]) -> list[Step]:
    """The steps, those in PyTorch whose results no kernel writes after all."""
    made = {step.node.name for step in steps if step.recipe}
    return [step if step.beside is None or step.beside.node in made else Step(step.node) for step in steps]


def value_forms(graph: Graph, dtype: str, formats: Mapping[str, InputFormat]) -> dict[str, Form]:
    """How every value lies in memory."""
    storage = STORAGE[dtype]
    forms = {given.name: _input_form(graph, given, formats[given.name], storage) for given in graph.inputs}
    return forms | stored_forms(graph, dtype)


def _input_form(graph: Graph, given: Input, format: InputFormat, storage: torch.dtype) -> Form:
    """Images lie as they come, for a kernel to convert; anything else as its readers want it, by the copy that
    brings it in. So do images of a type that their reader has no kernel for.
    """
    dtype = getattr(torch, given.dtype)
    if graph.typed:  # its readers know how inputs lie
        return Form(given.shape, dtype, format.layout)  # type: ignore[arg-type]
    if dtype.is_floating_point and len(given.shape) == 4:
        readers = graph.readers(given.name)

        def takes(type: torch.dtype) -> bool:
            return all(operator_of(node).takes_image_type(type, storage) for node in readers)

        own = next((type for type in (format.dtype, torch.float32) if takes(type)), storage)
        layout = format.layout if all(_reads_any_layout(node, given) for node in readers) else graph.images
        return Form(given.shape, own, layout)  # type: ignore[arg-type]
    return Form(given.shape, storage if dtype.is_floating_point else dtype, "flat")  # type: ignore[arg-type]


def _reads_any_layout(node: Node, given: Input) -> bool:
    """Whether a node reads an input as it comes; others were told how it lies."""
    operator = operator_of(node)
    return operator.takes_image_as_it_comes(node, given) or operator.layouts(node, {}).read is None


class _Choices:
    """Who does each node, chosen as if every value lay by itself: what was measured is so."""

    def __init__(
        self,
        nodes: Mapping[str, Node],
        asking: Forms,
        place: Place,
        avoid: frozenset[str],
        fusion: FusionLevel,
        in_pytorch: Mapping[str, str],
        decided: Table | None,
        deterministic: bool,
    ) -> None:
        self._nodes = dict(nodes)
        self._asking, self._place, self._avoid, self._fusion = asking, place, avoid, fusion
        self._in_pytorch = in_pytorch
        self._decided = decided
        self._deterministic = deterministic
        self._made: dict[str, Step] = {}
        self.chosen: dict[tuple[str, Problem], Choice] = {}

    def of(self, node: Node) -> Step:
        """The step of a node."""
        if node.name not in self._made:
            self._made[node.name] = self._step(node)
        return replace(self._made[node.name], node=node)

    def _step(self, node: Node) -> Step:
        operator = operator_of(node)
        if operator.is_alias(node, self._asking):
            return Step(node, is_alias=True)
        if node.name in self._in_pytorch:
            return Step(node, why_pytorch=self._in_pytorch[node.name])
        beside = operator.beside(node)
        if beside is not None:
            maker = self.of(self._nodes[beside.node])
            return Step(node, beside=beside) if maker.recipe else Step(node)
        forms = self._asking.of(node) if node.is_floating and self._has_its_types(node) else None
        lowered = None if forms is None else operator.lower(node, forms)
        if lowered is None:
            return Step(node, why_pytorch=operator.left_to_pytorch(node))
        _require_room(node, lowered, self._asking.value(node.name))
        if self._fusion is FusionLevel.naive:
            choice = _foot(lowered, self._place)
            return Step(node, lowered, choice, choice.rung.recipe(choice.problem, choice.config))
        choice = self._choice(lowered)
        if choice.problem != lowered.problem:
            raise UnsupportedError(f"{lowered.problem.name} would need another layout than the plan's")
        reason = reason_for_pytorch(lowered.operation, choice, self._place, self._avoid)
        if reason is not None and not self._deterministic:
            return Step(node, why_pytorch=reason)
        return Step(node, lowered, choice, choice.rung.recipe(choice.problem, choice.config))

    def _has_its_types(self, node: Node) -> bool:
        """Whether all that a node reads is of the floating type that its kernels take."""
        asking = self._asking
        if not asking.typed or operator_of(node).mixes_types:
            return True
        types = {
            asking.constant_type(name) if asking.is_constant(name) else asking.value(name).dtype
            for name in node.inputs.values()
        }
        return all(kind is getattr(torch, node.dtype) for kind in types if kind.is_floating_point)

    def _choice(self, lowered: Lowered) -> Choice:
        """Networks repeat their layers: each problem is thought about once."""
        asked = lowered.operation.name, lowered.problem
        if asked not in self.chosen:
            self.chosen[asked] = choose(
                lowered.operation, lowered.problem, self._place, avoid=self._avoid, decided=self._decided
            )
        return self.chosen[asked]

    def takes(self, node: Node, role: str, pitch: int) -> bool:
        """Whether a node takes a role's rows so many elements apart; PyTorch takes all."""
        step = self.of(node)
        return step.in_pytorch or (step.runs and _problem_apart(step, {role: pitch}) is not None)


def _require_kernels(steps: Sequence[Step]) -> None:
    for step in steps:
        node, operator = step.node, operator_of(step.node)
        if step.in_pytorch and node.is_floating and not operator.is_exact(node):
            raise UnsupportedError(
                f"deterministic=True has Escalade's kernels do all that adds up, and {node.source or node.name} "
                f"({operator.title(node)}) is left to PyTorch, which may do it in another way each time"
            )


def _problem_apart(step: Step, pitches: Mapping[str, int]) -> Problem | None:
    """A step's problem with rows of these roles apart; None where its rung does not take it."""
    assert step.lowered is not None and step.choice is not None
    try:
        problem = step.lowered.apart(pitches)
    except UnsupportedError:
        return None
    return problem if problem is not None and step.choice.rung.refusal(problem) is None else None


def _step(node: Node, parts: Parts, choices: _Choices) -> Step:
    """The step of a node over values where they lie."""
    if node.name in parts.in_place:
        return Step(node, is_alias=True)
    step = choices.of(node)
    roles = {**node.inputs, RESULT: node.name}
    used = {role: parts.places[name] for role, name in roles.items() if name in parts.places}
    if step.lowered is None or step.choice is None or not used:
        return step
    if not all(parts.is_aligned(roles[role]) for role in used):
        return Step(node)
    problem = _problem_apart(step, {role: place.pitch for role, place in used.items() if place.pitch})
    assert problem is not None, f"{step.choice.rung.name} has said that it takes {node.name} apart"
    lowered, choice = replace(step.lowered, problem=problem), replace(step.choice, problem=problem)
    return Step(node, lowered, choice, choice.rung.recipe(problem, choice.config))


def _require_room(node: Node, lowered: Lowered, form: Form) -> None:
    """A kernel writes what its problem says, whatever the graph says."""
    result = lowered.operation.output(lowered.problem, torch.device("meta"))
    if result.nbytes != form.bytes:
        raise UnsupportedError(
            f"{node.source or node.name} gives {result.nbytes} bytes ({lowered.problem.name}); the graph has "
            f"{form.bytes} for it, sizes {list(form.shape)}"
        )


def _foot(lowered: Lowered, place: Place) -> Choice:
    """The lowest rung that can do it, in memory that is the plan's own."""
    for rung in lowered.operation.ladder.on(Card.of(place)):
        if rung.refusal(lowered.problem) is None:
            choice = choose(lowered.operation, lowered.problem, place, rung.name)
            if not rung.recipe(choice.problem, choice.config).shared_state:
                return replace(choice, why="the foot of its ladder")
    raise UnsupportedError(f"no rung of {lowered.operation.name} can do {lowered.problem.name}")


@dataclass(frozen=True)
class _Values:
    """When each value is alive: inputs from the start, outputs to the end, everything else from its step to its last
    reader's.
    """

    first: Mapping[str, int]
    lives: Mapping[str, int]
    """The last step at which the bytes matter, of values that have bytes of their own."""
    owner: Mapping[str, str]
    """Values that share another's bytes."""
    apart: Mapping[str, int]
    """The last step at which values matter that have no place in the arena: PyTorch's, and views of them."""

    def root(self, name: str) -> str:
        return _root(name, self.owner)

    def offset(self, name: str, parts: Parts) -> int:
        """Bytes from the beginning of the root."""
        total = 0
        while name in self.owner:
            if name in parts.places:
                total += parts.places[name].first * parts.forms[name].dtype.itemsize
            name = self.owner[name]
        return total

    @staticmethod
    def of(graph: Graph, steps: Sequence[Step], parts: Parts, bound: frozenset[str]) -> _Values:
        """The values but those that are `bound` to tensors of somebody else's; views of these lie apart too."""
        end, forms = len(steps), parts.forms
        owner = {name: place.whole for name, place in parts.places.items()}
        last: dict[str, int] = {}
        made = {step.node.name: number for number, step in enumerate(steps)}
        made |= {step.node.name: made[step.beside.node] for step in steps if step.beside is not None}
        for step in steps:
            number = made[step.node.name]
            for name in step.node.inputs.values():
                last[name] = max(last.get(name, number), number)
            last.setdefault(step.node.name, number)
        for name in graph.outputs:
            last[name] = end
        for step in reversed(steps):  # a view's bytes are those of what it is a view of
            if step.is_alias or (step.in_pytorch and operator_of(step.node).may_share(step.node)):
                for name in step.node.inputs.values():
                    last[name] = max(last[name], last[step.node.name])
        in_pytorch = {step.node.name for step in steps if step.in_pytorch}
        given = {entry.name for entry in graph.inputs}
        first = dict.fromkeys(given, -1)
        lives: dict[str, int] = {name: last.get(name, -1) for name in given}
        for name, whole in owner.items():
            first[name] = made[name]
            first[whole] = min(first.get(whole, end), made[name], made.get(whole, end))
            lives[whole] = max(lives.get(whole, -1), last[name], last[whole])
        for number, step in enumerate(steps):
            name = step.node.name
            is_another = step.is_alias and name not in parts.in_place
            if name in first and not is_another:
                continue
            first[name] = made[name]
            shared = None
            if step.is_alias:
                shared = step.node.inputs["x"]
            elif step.lowered and step.lowered.in_place:
                candidate = step.node.inputs[step.lowered.in_place]
                whole = _root(candidate, owner)
                if (
                    whole in lives
                    and whole not in given
                    and whole not in in_pytorch
                    and lives[whole] == number
                    and forms[candidate].bytes == forms[name].bytes
                    and not forms[candidate].pitch
                    and list(step.node.inputs.values()).count(candidate) == 1
                ):
                    shared = candidate
            if shared is not None and _root(shared, owner) in first:
                owner[name] = shared
                whole = _root(name, owner)
                # What others are parts of may itself be another's bytes.
                lives[whole] = max(lives[whole], last[name], lives.pop(name, -1))
            else:
                lives[name] = last[name]
        in_arena = {_root(name, owner) for name in graph.outputs}
        elsewhere = (in_pytorch - in_arena) | bound
        apart = {name: lives[_root(name, owner)] for name in first if _root(name, owner) in elsewhere}
        lives = {name: end for name, end in lives.items() if name not in apart}
        apart = {name: end for name, end in apart.items() if name not in bound}
        return _Values(first, lives, owner, apart)


def _root(name: str, owner: Mapping[str, str]) -> str:
    while name in owner:
        name = owner[name]
    return name


def _are_few_launches(steps: Sequence[Step]) -> bool:
    """Few, and nothing that calls on several streams at once would have to share: counters are one for all."""
    launches = 0
    for step in steps:
        if step.in_pytorch:
            return False
        if step.recipe is None:
            continue
        each = step.recipe.after_packing.steps
        if step.recipe.shared_state or any(workspace.zeroed for workspace in step.recipe.workspaces):
            return False
        launches += len(each)
    return 1 <= launches <= MOST_DIRECT_LAUNCHES


def _outside(
    graph: Graph, steps: Sequence[Step], values: _Values, forms: Mapping[str, Form]
) -> dict[str, str]:
    """The values with the bytes of an input or an output that kernels alone read and write.

    The others are copied: those of PyTorch's steps and of kernels that read what these give, results that are no
    tensors of their own, but an input (which is copied then), a constant, or the bytes of another result, and results
    of another type than the model's. Calls of few launches have no arena to leave these in.
    """
    copied = {
        values.root(name)
        for step in steps
        if step.in_pytorch or not values.apart.keys().isdisjoint(step.node.inputs.values())
        for name in (*step.node.inputs.values(), step.node.name)
    }
    given = {entry.name for entry in graph.inputs}
    results = Counter(map(values.root, graph.outputs))
    holders = {name: name for name in given - copied - results.keys()}
    few = _are_few_launches(steps)
    for name, dtype in zip(graph.outputs, graph.output_types, strict=True):
        whole = values.root(name)
        if whole not in values.lives.keys() - given - copied or results[whole] > 1:
            continue
        as_returned = few or forms[name].dtype is getattr(torch, dtype)
        if as_returned and forms[whole].bytes == forms[name].bytes:
            holders[whole] = name
    everything = (*values.lives, *values.owner)
    return {name: holders[values.root(name)] for name in everything if values.root(name) in holders}


def _arenas(
    steps: Sequence[Step],
    values: _Values,
    forms: Mapping[str, Form],
    lasting: Mapping[str, Workspace],
    outside: Mapping[str, str],
) -> tuple[Arena, Arena]:
    """A place for everything that is inside, and for all that is outside."""
    own = [
        Lifetime(name, forms[name].bytes, values.first[name], end)
        for name, end in values.lives.items()
        if name not in outside
    ]
    scratch = [
        Lifetime(step.workspace_name(workspace), workspace.bytes, number, number)
        for number, step in enumerate(steps)
        if step.recipe
        for workspace in step.recipe.workspaces
        if step.workspace_name(workspace) not in lasting
    ]
    # Apart from each other and from all else, as the caller's tensors are.
    outer = [Lifetime(name, forms[name].bytes, 0, 0) for name in values.lives if name in outside]
    return assign([*own, *scratch]), assign(outer)
