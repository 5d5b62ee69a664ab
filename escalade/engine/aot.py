"""What a file carries for GPUs beside a network: plans for cards, and machine code for their architectures.

A plan is kept as what was decided for it, a rung and a config for each problem, and is made of that again, so that
nothing has to be weighed, and the kernels are those whose machine code is there. That is kept by a hash of source,
constants, headers and options for an architecture: whichever compiler made it, it is that source's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from escalade import parsing
from escalade.device.nvrtc import Cubin, compile_program, compiler_version, source_key
from escalade.device.precompilation import precompile
from escalade.device.program import Program
from escalade.engine.graph.forms import InputFormat
from escalade.engine.plan.plan import Plan
from escalade.errors import CompileError, UnsupportedError
from escalade.ops.base.card import H200, Card
from escalade.ops.base.cards import typical
from escalade.ops.choose.table import Decided, Entry, key_of

Inputs = tuple[tuple[tuple[int, ...], InputFormat], ...]
"""Sizes and formats of a plan's inputs."""
TENSOR = "kernel."
"""In front of the names of tensors that are machine code; a constant's name has no dot."""
_ARCHITECTURE = re.compile(r"sm_\d{2,3}[af]?")
_KEY = re.compile(r"[0-9a-f]{40}")
_MOST_PLANS = 1024
_PARTS = {"plans": list, "codes": dict}


@dataclass(frozen=True)
class KeptPlan:
    """What was decided for the plan of one set of inputs on a card."""

    card: str
    architecture: str
    multiprocessors: int
    inputs: list[Any]
    """Sizes, type and layout of each."""
    choices: dict[str, dict[str, Any]]
    """Rung and config by operation and problem."""
    in_pytorch: dict[str, str]
    """The nodes that PyTorch does, and why."""

    @staticmethod
    def of(plan: Plan, card: Card, inputs: Inputs) -> KeptPlan:
        assert card.architecture is not None, "the twin's plans are made again"
        return KeptPlan(
            card.name,
            card.architecture,
            card.multiprocessors,
            _plain(inputs),
            {
                key_of(operation, problem): {"rung": choice.rung.name, "config": choice.config.as_dict()}
                for (operation, problem), choice in plan.chosen.items()
            },
            {step.node.name: step.why_pytorch for step in plan.steps if step.in_pytorch and step.why_pytorch},
        )

    def is_for(self, card: Card) -> bool:
        return (self.card, self.architecture, self.multiprocessors) == (
            card.name, card.architecture, card.multiprocessors,
        )  # fmt: skip

    @property
    def decided(self) -> Decided:
        entries = {key: Entry(each["rung"], each["config"], 0.0) for key, each in self.choices.items()}
        return Decided("when the file was made", entries)


@dataclass(frozen=True)
class Carried:
    """Plans, and machine code by architecture and source."""

    plans: tuple[KeptPlan, ...] = ()
    codes: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    compilers: Mapping[str, str] = field(default_factory=dict)
    """What made the machine code of each architecture."""

    def plan_for(self, card: Card, inputs: Inputs) -> KeptPlan | None:
        plain = _plain(inputs)
        return next((plan for plan in self.plans if plan.is_for(card) and plan.inputs == plain), None)

    def missing(self, card: Card) -> str:
        """What has to be done again on a card, in a sentence; empty if nothing has, or nothing is carried."""
        if not self.plans or any(plan.is_for(card) for plan in self.plans):
            return ""
        cards = dict.fromkeys(
            f"{plan.card} ({plan.architecture}, {plan.multiprocessors} multiprocessors)"
            for plan in self.plans
        )
        kernels = (
            "kernels that they share with those of the file are taken from it, others are compiled"
            if card.architecture in self.codes
            else "kernels are compiled"
        )
        return (
            f"its plans are for {', '.join(cards)}, and this is {card.name} ({card.architecture}, "
            f"{card.multiprocessors} multiprocessors): plans are made again, and {kernels}"
        )

    def to_json(self) -> str:
        return json.dumps(
            {
                "plans": [asdict(plan) for plan in self.plans],
                "codes": {
                    architecture: {"compiler": self.compilers[architecture], "sources": sorted(codes)}
                    for architecture, codes in self.codes.items()
                },
            }
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The machine code as a file holds it."""
        return {
            f"{TENSOR}{source}": torch.frombuffer(bytearray(code), dtype=torch.uint8)
            for codes in self.codes.values()
            for source, code in codes.items()
        }


NOTHING = Carried()


def cards_for(kernels: bool | str | Sequence[str], own: Card | None, where: str) -> list[Card]:
    """The cards that kernels are saved for: that of the engine's own GPU, or one of each architecture that is named."""
    if isinstance(kernels, bool):
        if own is None:
            raise UnsupportedError(
                f"kernels=True saves machine code for the GPU that an engine runs on, and this one runs on {where}; "
                f"name architectures instead, such as kernels={H200.architecture!r}"
            )
        return [own]
    names = (kernels,) if isinstance(kernels, str) else kernels
    if not isinstance(names, tuple | list | set) or not all(isinstance(name, str) for name in names):
        raise UnsupportedError(
            f"kernels={kernels!r}: it is True, an architecture such as {H200.architecture!r}, or a list of them"
        )
    if "twin" in names:
        raise UnsupportedError(
            "the twin's kernels are code for this machine's processor, and stay here: a file carries machine code of "
            f"GPUs, such as kernels={H200.architecture!r}"
        )
    return [own if own is not None and name == own.architecture else typical(name) for name in names]


def code_for(programs: Iterable[Program], architecture: str) -> dict[str, bytes]:
    """Machine code for all of them, compiled on all cores where the cache does not have it; by their sources."""
    wanted = list(dict.fromkeys(programs))
    failures = precompile(wanted, architecture)
    if failures:
        raise CompileError(failures[0].message)
    return {
        source_key(program, architecture): compile_program(program, architecture).payload
        for program in wanted
    }


def carry(plans: Sequence[KeptPlan], programs: Mapping[str, Iterable[Program]]) -> Carried:
    """Plans with the machine code of their programs, by architecture."""
    codes = {architecture: code_for(wanted, architecture) for architecture, wanted in programs.items()}
    return Carried(tuple(plans), codes, dict.fromkeys(codes, compiler_version()))


def from_json(text: str, tensors: Mapping[str, torch.Tensor]) -> Carried:
    """What a file carries; whatever is not in its form is a ValueError."""
    values = parsing.parse_unique(text)
    if type(values) is not dict or {name: type(each) for name, each in values.items()} != _PARTS:
        raise ValueError("what it carries for GPUs is not plans and codes")
    _require_texts(values)
    if len(values["plans"]) > _MOST_PLANS:
        raise ValueError(f"it has {len(values['plans'])} plans; a file has up to {_MOST_PLANS}")
    plans = tuple(parsing.parse_dataclass(KeptPlan, each) for each in values["plans"])
    for plan in plans:
        _require_architecture(plan.architecture)
        for key, each in plan.choices.items():
            if (
                each.keys() != {"rung", "config"}
                or type(each["rung"]) is not str
                or type(each["config"]) is not dict
            ):
                raise ValueError(f"the choice for {key} is no rung with a config")
    codes, compilers = {}, {}
    for architecture, each in values["codes"].items():
        _require_architecture(architecture)
        made = parsing.parse_dataclass(_Codes, each)
        compilers[architecture] = made.compiler
        codes[architecture] = {source: _code(source, architecture, tensors) for source in made.sources}
    listed = {f"{TENSOR}{source}" for found in codes.values() for source in found}
    if listed != {name for name in tensors if name.startswith(TENSOR)}:
        raise ValueError("its machine code is not what it lists")
    return Carried(plans, codes, compilers)


@dataclass(frozen=True)
class _Codes:
    compiler: str
    sources: list[str]


def _plain(inputs: Inputs) -> list[Any]:
    return [[list(shape), str(form.dtype).removeprefix("torch."), form.layout] for shape, form in inputs]


def _code(source: str, architecture: str, tensors: Mapping[str, torch.Tensor]) -> bytes:
    if not _KEY.fullmatch(source) or f"{TENSOR}{source}" not in tensors:
        raise ValueError(f"{source!r} is no machine code of the file")
    found = tensors[f"{TENSOR}{source}"]
    if found.dtype != torch.uint8 or found.dim() != 1:
        raise ValueError(f"the machine code of {source} is no row of bytes")
    code = found.numpy().tobytes()
    if not Cubin.is_one(code):
        raise ValueError(f"the machine code of {source} is not for a GPU")
    return code


def _require_architecture(name: Any) -> None:
    if type(name) is not str or not _ARCHITECTURE.fullmatch(name):
        raise ValueError(f"{name!r} is no architecture of a GPU")


def _require_texts(value: Any) -> None:
    """Every text can be shown on a terminal."""
    if isinstance(value, dict):
        for key, item in value.items():
            _require_texts(key)
            _require_texts(item)
    elif isinstance(value, list):
        for item in value:
            _require_texts(item)
    elif isinstance(value, str) and not value.isprintable():
        raise ValueError(f"{value!r} is no text of one line")
