"""A step of an optimiser over all parameters of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby, pairwise
from typing import ClassVar

import torch

from escalade.device.program import Constant, Macro, Program
from escalade.device.recipe import Addresses, Buffer, Ints, KernelCall, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, NAMES, STORAGE, dtype_of, element, full_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import Codec, Named, NamePattern, joined
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.rung import Rung
from escalade.ops.calling.executables import prepare_rung
from escalade.ops.calling.library import define_in_place, require_rung, require_same_device
from escalade.ops.calling.types import as_list
from escalade.ops.expressions import Expression
from escalade.ops.shared.pointwise import PacksConfig

# --- rules


PARAMETER, GRADIENT, STEP = "p", "g", "step"
"""What every rule may name, besides its state and its scalars."""


@dataclass(frozen=True)
class Rule:
    """An optimiser: the new parameter, and then the new state, as an expression of `p`, `g`, the state, scalars and
    `step`, which is 1 at the first step."""

    expression: str
    state: tuple[str, ...]
    """The names of what is kept for each element; zeros before the first step."""
    values: tuple[tuple[str, float], ...]
    """The scalars by name."""

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """The scalars in the order in which the expression first uses them."""
        return scalar_names(self.expression, self.state)

    def scalars(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """The values as the operator takes them: an fp32 tensor in the order of `scalar_names`."""
        known = dict(self.values)
        return torch.tensor([known[name] for name in self.scalar_names], dtype=torch.float32, device=device)

    def scaled(self, scale: float = 65536.0) -> Rule:
        """The rule for gradients of a loss that was multiplied by `scale`, one more scalar."""
        unscaled = Expression.parse(f"{GRADIENT} * reciprocal(scale)")
        expression = Expression.parse(self.expression).substitute({GRADIENT: unscaled})
        return Rule(expression.text, self.state, (*self.values, ("scale", scale)))


def scalar_names(expression: str, state: tuple[str, ...]) -> tuple[str, ...]:
    """What an expression names besides the parameter, the gradient, the state and the step, in that order."""
    arrays = (PARAMETER, GRADIENT, STEP, *state)
    return tuple(name for name in Expression.parse(expression).inputs if name not in arrays)


def sgd(
    lr: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Rule:
    """`torch.optim.SGD`, whose momentum `m` begins as the first gradient, undamped."""
    if nesterov and (momentum <= 0 or dampening != 0):
        raise UnsupportedError(
            f"nesterov with a momentum of {momentum} and a dampening of {dampening}: it takes a momentum above 0 and "
            "no dampening"
        )
    gradient = _decayed(_ascending(maximize), weight_decay)
    values = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "undamped": 1 - dampening}
    if momentum == 0:
        return _rule(f"{PARAMETER} - lr * ({gradient})", (), values)
    velocity = "momentum * m + d"
    if dampening:
        velocity = f"where({STEP} > 1, momentum * m + undamped * d, d)"
    direction = "d + momentum * b" if nesterov else "b"
    return _rule(f"d = {gradient}; b = {velocity}; {PARAMETER} - lr * ({direction}), b", ("m",), values)


def adam(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled: bool = False,
) -> Rule:
    """`torch.optim.Adam`, and with `decoupled` weight decay AdamW.

    1 - beta^step comes from expm1 of the step times log(beta): as a difference in fp32 it would lose ten bits.
    """
    if not all(0 <= beta < 1 for beta in betas):
        raise UnsupportedError(f"betas of {betas}: each is at least 0 and below 1")
    gradient = _ascending(maximize) if decoupled else _decayed(_ascending(maximize), weight_decay)
    decayed = f"{PARAMETER} * (1 - lr * weight_decay)" if decoupled and weight_decay else PARAMETER
    largest, second = ("; l = maximum(w, s)", "l") if amsgrad else ("", "s")
    text = (
        f"d = {gradient}; f = lerp(m, d, rest1); s = beta2 * v + rest2 * d * d{largest}; "
        f"rate = lr / -expm1({STEP} * log_beta1); correction = reciprocal(sqrt(-expm1({STEP} * log_beta2))); "
        f"{decayed} - rate * f / (sqrt({second}) * correction + eps), f, s{', l' if amsgrad else ''}"
    )
    values = {
        "lr": lr, "weight_decay": weight_decay, "eps": eps, "rest1": 1 - betas[0], "beta2": betas[1],
        "rest2": 1 - betas[1], "log_beta1": _logarithm(betas[0]), "log_beta2": _logarithm(betas[1]),
    }  # fmt: skip
    return _rule(text, ("m", "v", "w") if amsgrad else ("m", "v"), values)


def _ascending(maximize: bool) -> str:
    return f"-{GRADIENT}" if maximize else GRADIENT


def _decayed(gradient: str, weight_decay: float) -> str:
    return f"{gradient} + weight_decay * {PARAMETER}" if weight_decay else gradient


def _logarithm(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _rule(text: str, state: tuple[str, ...], values: dict[str, float]) -> Rule:
    used = scalar_names(text, state)
    return Rule(Expression.parse(text).text, state, tuple((name, values[name]) for name in used))


# --- the problem


LAYOUTS = ("flat",)
COPIES = ("", "fp16", "bf16")
"""The types that parameters may be written in once more; empty: they are not."""
MOST_STATE = 6


def _read_sizes(text: str) -> tuple[int, ...]:
    sizes: list[int] = []
    for part in text.split("+"):
        count, _, size = part.rpartition("x")
        sizes += [int(size)] * int(count or 1)
    return tuple(sizes)


def _spell_sizes(sizes: tuple[int, ...]) -> str:
    runs = ((size, len(list(same))) for size, same in groupby(sizes))
    return "+".join(f"{count}x{size}" if count > 1 else str(size) for size, count in runs)


@dataclass(frozen=True)
class OptimizerStepProblem(Named):
    """p, state = expression(p, g, state, scalars, step) for each element of tensors of these sizes.

    p and the state are fp32, the gradients of `dtype`. With a `copy` p is written in that type too. A `checked` step
    counts as skipped, and writes nothing else, if any gradient is not finite.
    """

    NAME: ClassVar = NamePattern(
        "optimizer_step",
        r"{sizes}\[{expression:text}\][({state})][_copy{copy:fp16|bf16}]{checked?_checked}",
        sizes=Codec(r"(?:\d+x)?\d+(?:\+(?:\d+x)?\d+)*", _read_sizes, _spell_sizes),
        state=joined(",", r"\w+", str),
    )

    sizes: tuple[int, ...]
    expression: str
    state: tuple[str, ...] = ()
    copy: str = ""
    checked: bool = False
    dtype: str = "fp32"
    layout: str = "flat"
    batch: int = 1
    """Parameters belong to no image; records of all operations have a batch."""

    def __post_init__(self) -> None:
        program = Expression.parse(self.expression)
        object.__setattr__(self, "expression", program.text)
        require("optimizer_step", "dtype", self.dtype, DTYPES)
        require("optimizer_step", "layout", self.layout, LAYOUTS)
        require("optimizer_step", "a copy in", self.copy, COPIES)
        if self.batch != 1:
            raise UnsupportedError(
                f"a batch of {self.batch}: optimizer_step takes parameters, whatever their images"
            )
        if not self.sizes or not all(0 < size < 2**31 for size in self.sizes):
            raise UnsupportedError(
                f"tensors of {', '.join(map(str, self.sizes)) or 'no'} elements: optimizer_step takes one or more, "
                "each of 1 to 2^31 - 1"
            )
        if len(self.state) > MOST_STATE or {PARAMETER, GRADIENT, STEP} & set(self.state):
            raise UnsupportedError(
                f"state named {', '.join(self.state)}: there are up to {MOST_STATE}, and {PARAMETER}, {GRADIENT} and "
                f"{STEP} are the parameter, the gradient and the number of the step"
            )
        if len(program.results) != 1 + len(self.state):
            raise UnsupportedError(
                f"{program.text} has {len(program.results)} results: they are the new parameter and the new state, "
                f"{', '.join(self.state) or 'of which there is none'}"
            )

    @property
    def program(self) -> Expression:
        return Expression.parse(self.expression)

    @property
    def scalars(self) -> tuple[str, ...]:
        """The names of the scalars, as they lie in their tensor."""
        return scalar_names(self.expression, self.state)

    @property
    def elements(self) -> int:
        return sum(self.sizes)

    @property
    def flops(self) -> int:
        return self.elements * len(self.program.calls)

    @property
    def bytes(self) -> int:
        kept = 2 * (1 + len(self.state)) * ELEMENT_BYTES["fp32"]
        copy = ELEMENT_BYTES[self.copy] if self.copy else 0
        return self.elements * (kept + ELEMENT_BYTES[self.dtype] + copy)

    @property
    def rounding(self) -> float:
        """Each function rounds once."""
        return 2.0**-24 * max(1, len(self.program.calls))

    # --- buffers

    def read(self, tensor: int) -> tuple[str, ...]:
        """The buffers that are read of a tensor: the parameter, the gradient and the state."""
        return _read(tensor, self.state)

    def written(self, tensor: int) -> tuple[str, ...]:
        """The buffers that are written of a tensor: the parameter, the state, and the copy if there is one."""
        return _written(tensor, self.state, bool(self.copy))


@cache
def _read(tensor: int, state: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name}-{tensor}" for name in (PARAMETER, GRADIENT, *state))


@cache
def _written(tensor: int, state: tuple[str, ...], copied: bool) -> tuple[str, ...]:
    first = "y" if tensor == 0 else f"y-{tensor}"
    return (first, *(f"new_{name}-{tensor}" for name in state), *((f"copy-{tensor}",) if copied else ()))


# --- rungs, chunks: tensors cut into chunks, a block each: the rungs of optimizer_step


_TABLE_BYTES = 32_000
"""What the table of a launch may take: CUDA 12.1 and later pass 32,764 bytes of parameters."""
_ADDRESS_BYTES, _CHUNK_BYTES = 8, 8
_MEETING = Buffer("meeting")
_MEETING_BYTES = 8
_IN_FLIGHT = 8
"""Accesses of 16 bytes that a thread has under way by itself, about."""
_SINGLE_SHARE = 0.6
"""The share of the rate of memory that accesses of 4 bytes reach: a guess, between what pointwise kernels do."""


@dataclass(frozen=True)
class Chunks(Rung[OptimizerStepProblem, PacksConfig]):
    together: bool
    """Whether a launch has all tensors that its table has room for, or one."""
    wide: bool
    """Whether an access has 16 bytes, or one element."""

    def supports(self, problem: OptimizerStepProblem) -> str | None:
        return None

    def configs(self, problem: OptimizerStepProblem) -> tuple[PacksConfig, ...]:
        """Offers as many packs a thread as there are registers for and as leave enough blocks to go round."""
        every = [PacksConfig(threads, packs) for threads in (256, 128, 512) for packs in (4, 2, 1)]
        most = max(1, _IN_FLIGHT // len(problem.read(0)))
        fits = (
            config
            for config in every
            if config.packs <= most
            and ceil_div(problem.elements, self._chunk(problem, config)) >= self.card.busy_blocks
        )
        default = next(fits, PacksConfig(packs=1))
        return (default, *(config for config in every if config != default))

    def recipe(self, problem: OptimizerStepProblem, config: PacksConfig) -> Recipe:
        groups = list(self._groups(problem))
        steps = [self._step(problem, config, group, group is groups[-1]) for group in groups]
        if problem.checked:
            steps = [*(self._look(problem, config, group) for group in groups), *steps]
        return Recipe(tuple(steps), (Workspace(_MEETING.name, _MEETING_BYTES, zeroed=True),))

    def estimate(self, problem: OptimizerStepProblem, config: PacksConfig) -> float:
        launches = len(list(self._groups(problem))) * (2 if problem.checked else 1)
        moved = problem.bytes / (1.0 if self.wide else _SINGLE_SHARE)
        return self.card.microseconds(0, moved, launches)

    def tolerance(self, problem: OptimizerStepProblem, peer_error: float) -> float:
        """A copy may be rounded to the other neighbour of what the reference is rounded to."""
        tolerance = super().tolerance(problem, peer_error)
        return max(tolerance, {"fp16": 2.0**-11, "bf16": 2.0**-8}.get(problem.copy, 0.0))

    def _chunk(self, problem: OptimizerStepProblem, config: PacksConfig) -> int:
        """Elements of a block."""
        return config.threads * config.packs * self._vector

    @property
    def _vector(self) -> int:
        return full_vector("fp32") if self.wide else 1

    def _groups(self, problem: OptimizerStepProblem) -> Iterator[range]:
        """The tensors of each launch."""
        each = _CHUNK_BYTES + _ADDRESS_BYTES * (len(problem.read(0)) + len(problem.written(0)))
        most = _TABLE_BYTES // each if self.together else 1
        for first in range(0, len(problem.sizes), most):
            yield range(first, min(first + most, len(problem.sizes)))

    def _constants(
        self, problem: OptimizerStepProblem, config: PacksConfig, group: range
    ) -> dict[str, Constant]:
        return {
            "Gradient": element(problem.dtype), "TENSORS": len(group),
            "TENSORS_ROUNDED": 1 << (len(group) - 1).bit_length() >> 1, "STATES": len(problem.state),
            "HAS_COPY": bool(problem.copy), "VECTOR": self._vector, "PACKS": config.packs, "THREADS": config.threads,
        }  # fmt: skip

    def _table(
        self, problem: OptimizerStepProblem, config: PacksConfig, group: range
    ) -> tuple[Addresses, Ints, int]:
        """The addresses and sizes of a launch's tensors, and how many chunks these have."""
        read = [Buffer(name) for tensor in group for name in problem.read(tensor)]
        written = [Buffer(name) for tensor in group for name in problem.written(tensor)]
        sizes = [problem.sizes[tensor] for tensor in group]
        counts = [ceil_div(size, self._chunk(problem, config)) for size in sizes]
        *first, chunks = accumulate(counts, initial=0)
        return Addresses((*read, *written)), Ints((*first, *sizes)), chunks

    def _step(
        self, problem: OptimizerStepProblem, config: PacksConfig, group: range, counts: bool
    ) -> KernelCall:
        addresses, sizes, chunks = self._table(problem, config, group)
        constants: dict[str, Constant] = {
            **self._constants(problem, config, group),
            **_expressed(problem),
            "Copy": element(problem.copy or "fp32"),
            "CHECKED": problem.checked,
            "COUNTS": counts,
        }
        return KernelCall(
            Program.of("optimizer_step/chunks.cu", "optimizer_step_chunks", constants),
            (chunks, 1, 1),
            (config.threads, 1, 1),
            (addresses, sizes, Buffer("scalars"), Buffer("counts"), Buffer("counted"), _MEETING),
            overlap=True,
        )

    def _look(self, problem: OptimizerStepProblem, config: PacksConfig, group: range) -> KernelCall:
        addresses, sizes, chunks = self._table(problem, config, group)
        constants = self._constants(problem, config, group)
        return KernelCall(
            Program.of("optimizer_step/chunks_finite.cu", "optimizer_step_chunks_finite", constants),
            (chunks, 1, 1),
            (config.threads, 1, 1),
            (addresses, sizes, _MEETING),
            overlap=True,
        )


def _expressed(problem: OptimizerStepProblem) -> dict[str, Constant]:
    """The expression as chunks.cu takes it: what depends on scalars and the step alone, and the rest."""
    scalars = {name: f"scalars[{number}]" for number, name in enumerate(problem.scalars)}
    once, names, rest = problem.program.split_invariant((*problem.scalars, STEP))
    lines, results = once.statements({**scalars, STEP: "step"})
    lines += [f"uniform.at[{number}] = {result};" for number, result in enumerate(results)]
    places = {
        **{name: f"array[{number}]" for number, name in enumerate((PARAMETER, GRADIENT, *problem.state))},
        **{name: f"uniform.at[{number}]" for number, name in enumerate(names)},
    }
    return {
        **rest.constants("fp32"),
        "ONCE": Macro(" ".join(lines)),
        "UNIFORMS": max(1, len(names)),
        "INPUTS": Macro(", ".join(places[name] for name in rest.inputs)),
    }


# Predictions are for AdamW over the 62 tensors of ResNet-18 in fp32: 11.7 M elements of 28 bytes, 327 MB: 77 us at the
# rate of a copy.
RUNGS: tuple[Rung[OptimizerStepProblem], ...] = (
    Chunks("per_tensor", "a launch a tensor, an element an access", None, None, together=False, wide=False),
    Chunks(
        "one_launch",
        "one launch for all tensors, found by halving in a table among its parameters",
        below="per_tensor",
        # 62 launches of 2 us each and the time of memory, against that time alone.
        predicted_gain=2.0,
        together=True,
        wide=False,
    ),
    Chunks(
        "vectorised",
        "16 bytes an access, several of each array under way in a thread",
        below="one_launch",
        # Four loads of 4 bytes in each of 2,048 threads are 32 KiB under way on a multiprocessor, half of what memory
        # takes to be busy.
        predicted_gain=1.3,
        together=True,
        wide=True,
    ),
)


# --- problems to measure and to test


MOMENTUM = sgd(momentum=0.9, weight_decay=1e-4)
ADAMW = adam(weight_decay=1e-2, decoupled=True)


def of(rule: Rule, sizes: tuple[int, ...], copy: str = "", checked: bool = False) -> OptimizerStepProblem:
    """The problem of a rule."""
    return OptimizerStepProblem(sizes, rule.expression, rule.state, copy, checked)


def _resnet18() -> tuple[int, ...]:
    """The elements of each parameter, in the order of the model's."""
    sizes = [64 * 3 * 49, 64, 64]
    for channels, filters in pairwise((64, 64, 128, 256, 512)):
        for inputs in (channels, filters):
            sizes += [filters * inputs * 9, filters, filters, filters * filters * 9, filters, filters]
            if inputs != filters:
                sizes += [filters * inputs, filters, filters]
    return (*sizes, 512 * 1000, 1000)


def _autoencoder() -> tuple[int, ...]:
    channels = (3, 256, 128, 128, 256, 3)
    return tuple(size for before, after in pairwise(channels) for size in (after * before * 9, after))


RESNET18, AUTOENCODER = _resnet18(), _autoencoder()

PROBLEMS = (
    of(MOMENTUM, AUTOENCODER),
    of(ADAMW, AUTOENCODER),
    of(MOMENTUM, RESNET18),
    of(ADAMW, RESNET18),
    of(ADAMW.scaled(), RESNET18, "fp16", checked=True),
)
"""A convolutional autoencoder's parameters and ResNet-18's, the last with a loss scale and fp16 weights."""

SMALL_PROBLEMS = (
    of(sgd(), (1, 9, 4100)),
    of(sgd(momentum=0.9, dampening=0.1, weight_decay=1e-4, maximize=True), (2049, 64)),
    of(ADAMW.scaled(), (64, 3, 1027), "fp16", checked=True),
    of(adam(weight_decay=1e-2, amsgrad=True), (36,)),
)
"""Small problems that between them have tensors of several chunks, of a part of one and of a part of a pack; no state
and three; a copy and a check."""


# --- the reference


TAKEN, SKIPPED = 2.0, 1.0
"""Steps that random inputs are said to be behind."""
_TYPICAL = dict((*sgd(momentum=0.9, dampening=0.1, weight_decay=1e-4).values,
                 *adam(weight_decay=1e-2).scaled(1024.0).values))  # fmt: skip
"""Values of the scalars that rules have; others are one half."""


def random_inputs(problem: OptimizerStepProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Normal deviates for parameters and gradients, and between 0 and 1 for the state, among it squares."""
    generator = torch.Generator(device=device).manual_seed(seed)
    inputs = {
        "scalars": torch.tensor([_TYPICAL.get(name, 0.5) for name in problem.scalars], device=device),
        "counts": torch.tensor([TAKEN, SKIPPED, 1.0], device=device),
    }
    for tensor, size in enumerate(problem.sizes):
        parameter, gradient, *state = problem.read(tensor)
        inputs[parameter] = torch.randn(size, generator=generator, device=device)
        inputs[gradient] = torch.randn(size, generator=generator, device=device).to(STORAGE[problem.dtype])
        inputs |= {name: torch.rand(size, generator=generator, device=device) for name in state}
    return inputs


def empty_output(problem: OptimizerStepProblem, device: torch.device) -> torch.Tensor:
    return torch.empty(problem.sizes[0], device=device)


def extra_outputs(problem: OptimizerStepProblem, device: torch.device) -> dict[str, torch.Tensor]:
    """Room for the other parameters, the state, the copies, and how many steps have been taken and skipped, and whether
    this one was."""
    made = {"counted": torch.empty(3, device=device)}
    for tensor, size in enumerate(problem.sizes):
        for name in problem.written(tensor):
            copied = problem.copy and name.startswith("copy")
            made[name] = torch.empty(size, device=device, dtype=STORAGE[problem.copy if copied else "fp32"])
    del made["y"]
    return made


def exact(problem: OptimizerStepProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The first parameter in float64."""
    return _results(problem, inputs, 0, torch.float64)[0]


def further(problem: OptimizerStepProblem, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All else in float64, copies rounded to their type."""
    counted = torch.tensor([TAKEN + 1, SKIPPED, 0.0], dtype=torch.float64, device=inputs["counts"].device)
    found = {"counted": counted}
    for tensor in range(len(problem.sizes)):
        results = _results(problem, inputs, tensor, torch.float64)
        copies = (results[0].to(STORAGE[problem.copy]).double(),) if problem.copy else ()
        found |= dict(zip(problem.written(tensor), (*results, *copies), strict=True))
    del found["y"]
    return found


def peer(problem: OptimizerStepProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The first parameter by PyTorch in fp32."""
    return _results(problem, inputs, 0, torch.float32)[0]


def _results(
    problem: OptimizerStepProblem, inputs: Mapping[str, torch.Tensor], tensor: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    arrays = zip((PARAMETER, GRADIENT, *problem.state), problem.read(tensor), strict=True)
    given = {name: inputs[buffer].to(dtype) for name, buffer in arrays}
    given |= dict(zip(problem.scalars, inputs["scalars"].to(dtype), strict=True))
    given[STEP] = inputs["counts"][0].to(dtype) + 1
    return problem.program.evaluate(given)


# --- the operation


class OptimizerStep(Operation[OptimizerStepProblem]):
    name = "optimizer_step"
    problem = OptimizerStepProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("optimizer_step", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: OptimizerStepProblem) -> tuple[str, ...]:
        return ("vectorised",)

    def extra_outputs(self, problem: OptimizerStepProblem, device: torch.device) -> dict[str, torch.Tensor]:
        return extra_outputs(problem, device)

    def extra_references(self, problem: OptimizerStepProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        return further(problem, inputs)


OPTIMIZER_STEP = OptimizerStep()


# --- the PyTorch operator


PROGRESS = 8
"""Elements of `progress`: steps taken, steps skipped, whether the last was, and from the fifth on what blocks leave
each other."""
_COUNTS, _MEETING_OP = 3, 4


def no_progress(device: torch.device | str = "cpu") -> torch.Tensor:
    """The `progress` of an optimiser that has taken no step.

    Its first two elements count the steps taken and skipped; the third is 1 if the last was skipped, as
    `torch._amp_update_scale_` takes it for the next loss scale.
    """
    return torch.zeros(PROGRESS, device=device)


def optimizer_step(
    rule: Rule,
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    state: Mapping[str, Sequence[torch.Tensor]],
    scalars: torch.Tensor,
    progress: torch.Tensor,
    *,
    copies: Sequence[torch.Tensor] = (),
    checked: bool = False,
    rung: str | None = None,
) -> None:
    """One step of an optimiser over all parameters in one launch, in place.

    Parameters and state (a list for each name of the rule's, zeros at first) are float32, gradients float32, float16 or
    bfloat16. `scalars` are the rule's (`Rule.scalars`) and `progress` what `no_progress` gave; both lie on the device,
    and what they hold may change from step to step, in a CUDA graph too. `copies`, float16 or bfloat16, get the new
    parameters once more. A `checked` step changes nothing but its count if any gradient is not finite. The same inputs
    give the same bits every time. `rung` names one rung.
    """
    if not isinstance(rule, Rule) or not isinstance(state, Mapping):
        raise UnsupportedError(
            f"a rule that is {type(rule).__name__} and a state that is {type(state).__name__}: optimizer_step takes a "
            "Rule, and for each name of its state tensors"
        )
    if set(state) != set(rule.state):
        raise UnsupportedError(
            f"state of {', '.join(state) or 'nothing'}: the rule keeps {', '.join(rule.state) or 'nothing'}"
        )
    kept = [tensor for name in rule.state for tensor in state[name]]
    OPERATOR(
        as_list(parameters), as_list(gradients), kept, as_list(copies), scalars, progress, rule.expression,
        list(rule.state), checked, rung,
    )  # fmt: skip


def _problem(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    state: list[torch.Tensor],
    copies: list[torch.Tensor],
    scalars: torch.Tensor,
    progress: torch.Tensor,
    expression: str,
    names: list[str],
    checked: bool,
) -> OptimizerStepProblem:
    if not parameters or len(gradients) != len(parameters):
        raise UnsupportedError(
            f"{len(parameters)} parameters and {len(gradients)} gradients: there is one of each, at least one"
        )
    if len(state) != len(names) * len(parameters) or len(copies) not in (0, len(parameters)):
        raise UnsupportedError(
            f"{len(parameters)} parameters, {len(state)} tensors of state and {len(copies)} copies: each parameter has "
            f"{', '.join(names) or 'no state'}, and all have a copy or none"
        )
    problem = OptimizerStepProblem(
        tuple(parameter.numel() for parameter in parameters),
        expression,
        tuple(names),
        _dtype("copies", copies) if copies else "",
        checked,
        _dtype("gradients", gradients),
    )
    _check_overwritten(parameters, state, copies)
    for name, tensor, length in (
        ("scalars", scalars, len(problem.scalars)),
        ("progress", progress, PROGRESS),
    ):
        if tensor.dtype != torch.float32 or tensor.shape != (length,) or not tensor.is_contiguous():
            raise UnsupportedError(
                f"{name} is {tensor.dtype} of {list(tensor.shape)}: it is a dense float32 tensor of {length} elements"
                + (f", {', '.join(problem.scalars)}" if name == "scalars" else "")
            )
    for name, tensors in {"gradients": gradients, "scalars": [scalars], "progress": [progress]}.items():
        for tensor in tensors:
            require_same_device(parameters[0], name, tensor)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient.shape != parameter.shape:
            raise UnsupportedError(
                f"a gradient of {list(gradient.shape)} for a parameter of {list(parameter.shape)}: they have one shape"
            )
    return problem


def _dtype(name: str, tensors: list[torch.Tensor]) -> str:
    if len({tensor.dtype for tensor in tensors}) != 1:
        given = sorted({str(tensor.dtype) for tensor in tensors})
        raise UnsupportedError(f"{name} of {' and '.join(given)}: all of them have one type")
    return NAMES[tensors[0].dtype] if tensors[0].dtype in NAMES else dtype_of("optimizer_step", tensors[0])


def _check_overwritten(
    parameters: list[torch.Tensor], state: list[torch.Tensor], copies: list[torch.Tensor]
) -> None:
    """What is overwritten lies as its parameter does, without gaps."""
    for parameter in parameters:
        if not (parameter.is_contiguous() or parameter.stride() == torch.empty_like(parameter).stride()):
            raise UnsupportedError(
                f"a parameter of {list(parameter.shape)} with strides {list(parameter.stride())}: optimizer_step takes "
                "those that lie without gaps"
            )
    shapes = [(parameter.shape, parameter.stride()) for parameter in parameters]
    for name, group in {"parameters": parameters, "state": state, "copies": copies}.items():
        for number, tensor in enumerate(group):
            shape, stride = shapes[number % len(shapes)]
            if tensor.shape != shape or tensor.stride() != stride:
                raise UnsupportedError(
                    f"{name} of {list(tensor.shape)} with strides {list(tensor.stride())}, where a parameter has "
                    f"{list(shape)} and {list(stride)}: both lie alike"
                )
            if tensor.dtype != torch.float32 and group is not copies:
                raise UnsupportedError(
                    f"{name} are {tensor.dtype}; optimizer_step keeps them in torch.float32"
                )
            require_same_device(parameters[0], name, tensor)


def _run(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    state: list[torch.Tensor],
    copies: list[torch.Tensor],
    scalars: torch.Tensor,
    progress: torch.Tensor,
    expression: str,
    names: list[str],
    checked: bool = False,
    rung: str | None = None,
) -> None:
    problem = _problem(parameters, gradients, state, copies, scalars, progress, expression, names, checked)
    require_rung(OPTIMIZER_STEP, rung)
    counts, meeting = progress[:_COUNTS], progress[_MEETING_OP:]
    tensors = {"scalars": scalars, "counts": counts, "counted": counts, "meeting": meeting}
    for tensor, arrays in enumerate(_by_parameter(parameters, state, copies)):
        parameter, kept, copied = arrays
        gradient = _lying_like(gradients[tensor], parameter)
        tensors |= zip(problem.read(tensor), (parameter, gradient, *kept), strict=True)
        tensors |= zip(problem.written(tensor), (parameter, *kept, *copied), strict=True)
    prepare_rung(OPTIMIZER_STEP, problem, scalars.device, rung).run(tensors)


def _lying_like(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The gradient with its elements in the parameter's order; itself if it is so, wherever it begins."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def _by_parameter(
    parameters: list[torch.Tensor], state: list[torch.Tensor], copies: list[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]]:
    count = len(parameters)
    for number, parameter in enumerate(parameters):
        yield parameter, state[number::count], copies[number : number + 1]


def _fake(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    state: list[torch.Tensor],
    copies: list[torch.Tensor],
    scalars: torch.Tensor,
    progress: torch.Tensor,
    expression: str,
    names: list[str],
    checked: bool = False,
    rung: str | None = None,
) -> None:
    _problem(parameters, gradients, state, copies, scalars, progress, expression, names, checked)


OPERATOR = define_in_place(
    "optimizer_step(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] state, Tensor(c!)[] copies, "
    "Tensor scalars, Tensor(d!) progress, str expression, str[] names, bool checked=False, str? rung=None) -> ()",
    _run,
    _fake,
)
