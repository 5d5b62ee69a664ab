"""Ahead-of-time artifacts in an engine file: plans for cards, and machine code for their architectures.

A plan is saved as its decisions, a rung and a config per problem, and rebuilt from them. That skips choosing, and gives
exactly the kernels whose machine code is in the file. Machine code is keyed by a hash of source, constants, headers and
options for an architecture, regardless of the compiler version.
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
from escalade.ops.base.cards import typical_card
from escalade.ops.choose.table import Decided, Entry, key_of

InputSpecs = tuple[tuple[tuple[int, ...], InputFormat], ...]
"""Shape and format of each input of a plan."""
CODE_PREFIX = "kernel."
"""Prefix of the names of machine-code tensors. Names of constants have no dot, so the two cannot collide."""
_ARCHITECTURE = re.compile(r"sm_\d{2,3}[af]?")
_SOURCE_KEY = re.compile(r"[0-9a-f]{40}")
_MAX_PLANS = 1024
_SECTIONS = {"plans": list, "codes": dict}


@dataclass(frozen=True)
class SavedPlan:
    """Decisions of the plan for one set of inputs on a card. Field names are keys of the file format."""

    card: str
    architecture: str
    multiprocessors: int
    inputs: list[Any]
    """Shape, dtype and layout of each input."""
    choices: dict[str, dict[str, Any]]
    """Rung and config by operation and problem."""
    in_pytorch: dict[str, str]
    """Nodes that PyTorch computes, with the reason."""

    @staticmethod
    def of(plan: Plan, card: Card, inputs: InputSpecs) -> SavedPlan:
        assert card.architecture is not None, "plans for the twin are not saved"
        return SavedPlan(
            card.name,
            card.architecture,
            card.multiprocessors,
            _to_plain(inputs),
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
class AotArtifacts:
    """Saved plans, and machine code by architecture and source key."""

    plans: tuple[SavedPlan, ...] = ()
    codes: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    compilers: Mapping[str, str] = field(default_factory=dict)
    """The compiler version that built each architecture's machine code."""

    def plan_for(self, card: Card, inputs: InputSpecs) -> SavedPlan | None:
        plain = _to_plain(inputs)
        return next((plan for plan in self.plans if plan.is_for(card) and plan.inputs == plain), None)

    def served(self, card: Card) -> list[str]:
        """Return the inputs of the plans for a card, whose kernels need no compiler."""
        return [
            ", ".join(f"{'×'.join(map(str, shape))} {dtype} {layout}" for shape, dtype, layout in plan.inputs)
            for plan in self.plans
            if plan.is_for(card)
        ]

    def explain_mismatch(self, card: Card) -> str:
        """Return a sentence on what must be rebuilt for a card; empty if nothing must, or if there are no plans."""
        if not self.plans or any(plan.is_for(card) for plan in self.plans):
            return ""
        cards = dict.fromkeys(
            f"{plan.card} ({plan.architecture}, {plan.multiprocessors} SMs)" for plan in self.plans
        )
        kernels = (
            "kernels that are not in the file are compiled"
            if card.architecture in self.codes
            else "kernels are compiled"
        )
        return (
            f"its plans are for {', '.join(cards)}, but this GPU is {card.name} ({card.architecture}, "
            f"{card.multiprocessors} SMs): networks are planned again, and {kernels}"
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
        """Return the machine code as uint8 tensors, named as in the file."""
        return {
            f"{CODE_PREFIX}{source}": torch.frombuffer(bytearray(code), dtype=torch.uint8)
            for codes in self.codes.values()
            for source, code in codes.items()
        }


NO_ARTIFACTS = AotArtifacts()


def cards_for(kernels: bool | str | Sequence[str], own: Card | None, where: str) -> list[Card]:
    """Return the cards to save kernels for: the engine's own GPU, or a typical card per named architecture."""
    if isinstance(kernels, bool):
        if own is None:
            raise UnsupportedError(
                f"kernels=True saves machine code for the GPU that an engine runs on, but this engine runs on {where}; "
                f"name architectures instead, such as kernels={H200.architecture!r}"
            )
        return [own]
    names = (kernels,) if isinstance(kernels, str) else kernels
    if not isinstance(names, tuple | list | set) or not all(isinstance(name, str) for name in names):
        raise UnsupportedError(
            f"kernels={kernels!r}: pass True, an architecture such as {H200.architecture!r}, or a list of architectures"
        )
    if "twin" in names:
        raise UnsupportedError(
            "the twin's kernels are built for this machine's CPU and cannot be saved; name GPU architectures, such as "
            f"kernels={H200.architecture!r}"
        )
    return [own if own is not None and name == own.architecture else typical_card(name) for name in names]


def compile_programs(programs: Iterable[Program], architecture: str) -> dict[str, bytes]:
    """Return machine code by source key, compiling on all cores what is not cached."""
    wanted = list(dict.fromkeys(programs))
    failures = precompile(wanted, architecture)
    if failures:
        raise CompileError(failures[0].message)
    return {
        source_key(program, architecture): compile_program(program, architecture).payload
        for program in wanted
    }


def build_artifacts(plans: Sequence[SavedPlan], programs: Mapping[str, Iterable[Program]]) -> AotArtifacts:
    """Compile `programs`, given by architecture, and bundle their machine code with the plans."""
    codes = {name: compile_programs(wanted, name) for name, wanted in programs.items()}
    return AotArtifacts(tuple(plans), codes, dict.fromkeys(codes, compiler_version()))


def from_json(text: str, tensors: Mapping[str, torch.Tensor]) -> AotArtifacts:
    """Parse the artifacts of a file; raises ValueError if anything is malformed."""
    values = parsing.parse_unique(text)
    if type(values) is not dict or {name: type(each) for name, each in values.items()} != _SECTIONS:
        raise ValueError("its artifacts for GPUs are not an object with plans and codes")
    _require_printable(values)
    if len(values["plans"]) > _MAX_PLANS:
        raise ValueError(f"it has {len(values['plans'])} plans; the limit is {_MAX_PLANS}")
    plans = tuple(parsing.parse_dataclass(SavedPlan, each) for each in values["plans"])
    for plan in plans:
        _require_architecture(plan.architecture)
        for key, each in plan.choices.items():
            if (
                each.keys() != {"rung", "config"}
                or type(each["rung"]) is not str
                or type(each["config"]) is not dict
            ):
                raise ValueError(f"the choice for {key} is not a rung with a config")
    codes, compilers = {}, {}
    for architecture, each in values["codes"].items():
        _require_architecture(architecture)
        index = parsing.parse_dataclass(_CodeIndex, each)
        compilers[architecture] = index.compiler
        codes[architecture] = {source: _read_code(source, tensors) for source in index.sources}
    listed = {f"{CODE_PREFIX}{source}" for found in codes.values() for source in found}
    if listed != {name for name in tensors if name.startswith(CODE_PREFIX)}:
        raise ValueError("its machine code does not match its list of sources")
    return AotArtifacts(plans, codes, compilers)


@dataclass(frozen=True)
class _CodeIndex:
    compiler: str
    sources: list[str]


def _to_plain(inputs: InputSpecs) -> list[Any]:
    return [[list(shape), str(form.dtype).removeprefix("torch."), form.layout] for shape, form in inputs]


def _read_code(source: str, tensors: Mapping[str, torch.Tensor]) -> bytes:
    if not _SOURCE_KEY.fullmatch(source) or f"{CODE_PREFIX}{source}" not in tensors:
        raise ValueError(f"it has no machine code for the source {source!r}")
    found = tensors[f"{CODE_PREFIX}{source}"]
    if found.dtype != torch.uint8 or found.dim() != 1:
        raise ValueError(f"the machine code of {source} is not a vector of bytes")
    code = found.numpy().tobytes()
    if not Cubin.is_one(code):
        raise ValueError(f"the machine code of {source} is not for a GPU")
    return code


def _require_architecture(name: Any) -> None:
    if type(name) is not str or not _ARCHITECTURE.fullmatch(name):
        raise ValueError(f"{name!r} is not a GPU architecture")


def _require_printable(value: Any) -> None:
    """Refuse strings with control characters, which are unsafe to print on a terminal."""
    if isinstance(value, dict):
        for key, item in value.items():
            _require_printable(key)
            _require_printable(item)
    elif isinstance(value, list):
        for item in value:
            _require_printable(item)
    elif isinstance(value, str) and not value.isprintable():
        raise ValueError(f"{value!r} is not a printable line of text")
