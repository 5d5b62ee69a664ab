"""One optimizer step over all parameters of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby, pairwise
from typing import Any, ClassVar

import torch

from escalade.device.program import Constant, Macro, Program
from escalade.device.recipe import Addresses, Buffer, Ints, KernelCall, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, NAMES, STORAGE, dtype_of, full_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import kernel_call
from escalade.ops.base.naming import Codec, Named, NamePattern, joined
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.rung import Rung, first_that
from escalade.ops.calling.executables import prepare_rung
from escalade.ops.calling.library import define_in_place, require_rung, require_same_device
from escalade.ops.calling.types import as_list
from escalade.ops.expressions import Expression
from escalade.ops.shared.pointwise import PacksConfig

# --- rules


PARAMETER, GRADIENT, STEP = "p", "g", "step"
"""Names that every rule may use, besides its state and its scalars."""


@dataclass(frozen=True)
class Rule:
    """An optimizer: the new parameter and then the new state, as an expression in `p`, `g`, the state, scalars and
    `step`, which is 1 at the first step."""

    expression: str
    state: tuple[str, ...]
    """Names of the state per element; zeros before the first step."""
    values: tuple[tuple[str, float], ...]
    """Scalars by name."""

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Names of the scalars, in the order of their first use."""
        return scalar_names(self.expression, self.state)

    def scalars(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the values as the operator takes them: an fp32 tensor in the order of `scalar_names`."""
        known = dict(self.values)
        return torch.tensor([known[name] for name in self.scalar_names], dtype=torch.float32, device=device)

    def scaled(self, scale: float = 65536.0) -> Rule:
        """Return the rule for gradients of a loss multiplied by `scale`, which becomes another scalar."""
        unscaled = Expression.parse(f"{GRADIENT} * reciprocal(scale)")
        expression = Expression.parse(self.expression).substitute({GRADIENT: unscaled})
        return Rule(expression.text, self.state, (*self.values, ("scale", scale)))

    def clipped(self, limit: float) -> Rule:
        """Return the rule for gradients whose magnitude is limited; the limit becomes another scalar."""
        within = Expression.parse(f"minimum(maximum({GRADIENT}, -limit), limit)")
        expression = Expression.parse(self.expression).substitute({GRADIENT: within})
        return Rule(expression.text, self.state, (*self.values, ("limit", limit)))


def scalar_names(expression: str, state: tuple[str, ...]) -> tuple[str, ...]:
    """Return the inputs other than parameter, gradient, state and step, in the order of their first use."""
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
    """`torch.optim.SGD`; the momentum `m` starts as the first gradient, undamped."""
    if nesterov and (momentum <= 0 or dampening != 0):
        raise UnsupportedError(
            f"nesterov with momentum {momentum} and dampening {dampening}: it needs a momentum above 0 and no dampening"
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

    1 - beta^step is computed with expm1 of step * log(beta), since the difference would lose ten bits in fp32.
    """
    if not all(0 <= beta < 1 for beta in betas):
        raise UnsupportedError(f"betas are {betas}: each must be at least 0 and below 1")
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


def rmsprop(
    lr: float = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    maximize: bool = False,
) -> Rule:
    """`torch.optim.RMSprop`."""
    gradient = _decayed(_ascending(maximize), weight_decay)
    text = f"d = {gradient}; s = alpha * v + rest * d * d; "
    variance, direction, state = "s", "e", ["s"]
    if centered:
        text += "f = lerp(a, d, rest); "
        variance = "s - f * f"
        state.append("f")
    text += f"e = d / (sqrt({variance}) + eps); "
    if momentum > 0:
        text += "b = momentum * m + e; "
        direction = "b"
        state.append("b")
    values = {
        "lr": lr, "alpha": alpha, "rest": 1 - alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum,
    }  # fmt: skip
    roles = tuple({"s": "v", "f": "a", "b": "m"}[name] for name in state)
    return _rule(f"{text}{PARAMETER} - lr * {direction}, {', '.join(state)}", roles, values)


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
"""Types of an additional copy of the parameters; empty for none."""
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

    p and the state are fp32, gradients have the `dtype`, and those of the last `wide` tensors are fp32. With `copy` p
    is also written in that type. A `checked` step counts as skipped, and writes nothing else, if any gradient is not
    finite.
    """

    NAME: ClassVar = NamePattern(
        "optimizer_step",
        r"{sizes}\[{expression:text}\][({state})][_copy{copy:fp16|bf16}][_wide{wide}]{checked?_checked}",
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
    """Always 1; records of all operations have a batch."""
    wide: int = 0

    def __post_init__(self) -> None:
        program = Expression.parse(self.expression)
        object.__setattr__(self, "expression", program.text)
        require("optimizer_step", "dtype", self.dtype, DTYPES)
        require("optimizer_step", "layout", self.layout, LAYOUTS)
        require("optimizer_step", "a copy in", self.copy, COPIES)
        if self.batch != 1:
            raise UnsupportedError(
                f"batch is {self.batch}: optimizer_step counts elements, and its batch must be 1"
            )
        if not self.sizes or not all(0 < size < 2**31 for size in self.sizes):
            raise UnsupportedError(
                f"tensors of {', '.join(map(str, self.sizes)) or 'no'} elements: optimizer_step needs at least one, "
                "each of 1 to 2^31 - 1"
            )
        if not 0 <= self.wide <= len(self.sizes):
            raise UnsupportedError(
                f"{self.wide} tensors with fp32 gradients: optimizer_step has {len(self.sizes)} tensors"
            )
        if len(self.state) > MOST_STATE or {PARAMETER, GRADIENT, STEP} & set(self.state):
            raise UnsupportedError(
                f"state {', '.join(self.state)}: at most {MOST_STATE} names, other than {PARAMETER}, {GRADIENT} and "
                f"{STEP} (parameter, gradient and step number)"
            )
        if len(program.results) != 1 + len(self.state):
            raise UnsupportedError(
                f"{program.text} has {len(program.results)} results: it needs the new parameter and the new state "
                f"({', '.join(self.state) or 'none'})"
            )

    @property
    def program(self) -> Expression:
        return Expression.parse(self.expression)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the scalars, in the order of their tensor."""
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
        wide = sum(self.sizes[len(self.sizes) - self.wide :]) * (
            ELEMENT_BYTES["fp32"] - ELEMENT_BYTES[self.dtype]
        )
        return self.elements * (kept + ELEMENT_BYTES[self.dtype] + copy) + wide

    @property
    def rounding(self) -> float:
        """Each function rounds once."""
        return 2.0**-24 * max(1, len(self.program.calls))

    # --- buffers

    def read(self, tensor: int) -> tuple[str, ...]:
        """Return the buffers read for a tensor: parameter, gradient and state."""
        return _read(tensor, self.state)

    def gradient_type(self, tensor: int) -> str:
        return "fp32" if tensor >= len(self.sizes) - self.wide else self.dtype

    def written(self, tensor: int) -> tuple[str, ...]:
        """Return the buffers written for a tensor: parameter, state, and the copy if any."""
        return _written(tensor, self.state, bool(self.copy))


@cache
def _read(tensor: int, state: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name}-{tensor}" for name in (PARAMETER, GRADIENT, *state))


@cache
def _written(tensor: int, state: tuple[str, ...], copied: bool) -> tuple[str, ...]:
    first = "y" if tensor == 0 else f"y-{tensor}"
    return (first, *(f"new_{name}-{tensor}" for name in state), *((f"copy-{tensor}",) if copied else ()))


# --- rungs: tensors cut into chunks, one per CTA


_TABLE_BYTES = 32_000  # per launch: CUDA 12.1 and later pass 32,764 bytes of parameters
_ADDRESS_BYTES, _CHUNK_BYTES = 8, 8
_MEETING = Buffer("meeting")
_MEETING_BYTES = 8
_IN_FLIGHT = 8  # 16-byte accesses per thread, about
_SINGLE_SHARE = 0.6
"""Fraction of DRAM bandwidth that 4-byte accesses reach: a guess from pointwise kernels."""


@dataclass(frozen=True)
class Chunks(Rung[OptimizerStepProblem, PacksConfig]):
    together: bool
    """True if a launch covers all tensors that fit its table, False for one launch per tensor."""
    wide: bool
    """True for 16-byte accesses, False for single elements."""

    def configs(self, problem: OptimizerStepProblem) -> tuple[PacksConfig, ...]:
        """Default to the most packs per thread that fit the registers and leave enough CTAs."""
        every = [PacksConfig(threads, packs) for threads in (256, 128, 512) for packs in (4, 2, 1)]
        most = max(1, _IN_FLIGHT // len(problem.read(0)))

        def fits(config: PacksConfig) -> bool:
            chunks = ceil_div(problem.elements, self._chunk(problem, config))
            return config.packs <= most and chunks >= self.card.busy_blocks

        return first_that(fits, every, PacksConfig(packs=1))

    def recipe(self, problem: OptimizerStepProblem, config: PacksConfig) -> Recipe:
        groups = list(self._groups(problem))
        steps = [self._step(problem, config, group, group is groups[-1]) for group in groups]
        if problem.checked:
            steps = [*(self._check(problem, config, group) for group in groups), *steps]
        return Recipe(tuple(steps), (Workspace(_MEETING.name, _MEETING_BYTES, zeroed=True),))

    def estimate(self, problem: OptimizerStepProblem, config: PacksConfig) -> float:
        launches = len(list(self._groups(problem))) * (2 if problem.checked else 1)
        moved = problem.bytes / (1.0 if self.wide else _SINGLE_SHARE)
        return self.card.microseconds(0, moved, launches)

    def tolerance(self, problem: OptimizerStepProblem, peer_error: float) -> float:
        """A copy may round to the other neighbor of the value that the reference rounds to."""
        tolerance = super().tolerance(problem, peer_error)
        return max(tolerance, {"fp16": 2.0**-11, "bf16": 2.0**-8}.get(problem.copy, 0.0))

    def _chunk(self, problem: OptimizerStepProblem, config: PacksConfig) -> int:
        """Return the elements per CTA."""
        return config.threads * config.packs * self._vector

    @property
    def _vector(self) -> int:
        return full_vector("fp32") if self.wide else 1

    def _groups(self, problem: OptimizerStepProblem) -> Iterator[range]:
        """Yield the tensors of each launch."""
        each = _CHUNK_BYTES + _ADDRESS_BYTES * (len(problem.read(0)) + len(problem.written(0)))
        most = _TABLE_BYTES // each if self.together else 1
        for first in range(0, len(problem.sizes), most):
            yield range(first, min(first + most, len(problem.sizes)))

    def _scope(self, problem: OptimizerStepProblem, config: PacksConfig, group: range) -> dict[str, Any]:
        wide = max(0, group.stop - max(group.start, len(problem.sizes) - problem.wide))
        return {"problem": problem, "config": config, "group": group, "vector": self._vector, "wide": wide}

    def _table(
        self, problem: OptimizerStepProblem, config: PacksConfig, group: range
    ) -> tuple[Addresses, Ints, int]:
        """Return addresses and sizes of a launch's tensors, and the number of chunks."""
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
        scope = self._scope(problem, config, group)
        return kernel_call(
            Program.of("optimizer_step/chunks.cu", constants=_generated(problem), counts=counts, **scope),
            chunks,
            config.threads,
            addresses, sizes, Buffer("scalars"), Buffer("counts"), Buffer("counted"), _MEETING,
        )  # fmt: skip

    def _check(self, problem: OptimizerStepProblem, config: PacksConfig, group: range) -> KernelCall:
        """Return the launch that checks for non-finite gradients."""
        addresses, sizes, chunks = self._table(problem, config, group)
        program = Program.of("optimizer_step/chunks_finite.cu", **self._scope(problem, config, group))
        return kernel_call(program, chunks, config.threads, addresses, sizes, _MEETING)


def _generated(problem: OptimizerStepProblem) -> dict[str, Constant]:
    """Split the expression for chunks.cu into what depends only on scalars and the step, and the rest."""
    scalars = {name: f"scalars[{number}]" for number, name in enumerate(problem.scalars)}
    once, names, rest = problem.program.split_invariant((*problem.scalars, STEP))
    lines, results = once.statements({**scalars, STEP: "step"})
    lines += [f"uniform.at[{number}] = {result};" for number, result in enumerate(results)]
    variables = {
        **{name: f"array[{number}]" for number, name in enumerate((PARAMETER, GRADIENT, *problem.state))},
        **{name: f"uniform.at[{number}]" for number, name in enumerate(names)},
    }
    return {
        **rest.constants("fp32"),
        "ONCE": Macro(" ".join(lines)),
        "UNIFORMS": max(1, len(names)),
        "INPUTS": Macro(", ".join(variables[name] for name in rest.inputs)),
    }


# Predictions are for AdamW over the 62 tensors of ResNet-18 in fp32: 11.7 M elements of 28 bytes, 327 MB: 77 us at copy
# rate.
RUNGS: tuple[Rung[OptimizerStepProblem], ...] = (
    Chunks(
        "per_tensor", "one launch per tensor, one element per access", None, None, together=False, wide=False
    ),
    Chunks(
        "one_launch",
        "one launch for all tensors, found by binary search in a table among its parameters",
        below="per_tensor",
        # 62 launches of 2 us each and the DRAM time, against that time alone.
        predicted_gain=2.0,
        together=True,
        wide=False,
    ),
    Chunks(
        "vectorised",
        "16 bytes per access, several of each array in flight per thread",
        below="one_launch",
        # Four 4-byte loads in each of 2,048 threads are 32 KiB in flight per SM, half of what saturates DRAM.
        predicted_gain=1.3,
        together=True,
        wide=True,
    ),
)


# --- problems


MOMENTUM = sgd(momentum=0.9, weight_decay=1e-4)
ADAMW = adam(weight_decay=1e-2, decoupled=True)


def of(
    rule: Rule, sizes: tuple[int, ...], copy: str = "", checked: bool = False, wide: int = 0
) -> OptimizerStepProblem:
    """Return the problem of a rule."""
    return OptimizerStepProblem(sizes, rule.expression, rule.state, copy, checked, wide=wide)


def _resnet18() -> tuple[int, ...]:
    """Return the elements of each parameter, in the model's order."""
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


# --- the reference


TAKEN, SKIPPED = 2.0, 1.0
"""Steps taken and skipped before those of random inputs."""
_TYPICAL = dict((*sgd(momentum=0.9, dampening=0.1, weight_decay=1e-4).values,
                 *adam(weight_decay=1e-2).scaled(1024.0).values))  # fmt: skip
"""Typical values of scalars; others are 0.5."""


def random_inputs(problem: OptimizerStepProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Normal parameters and gradients; state between 0 and 1, since it includes squares."""
    inputs = {
        "scalars": torch.tensor([_TYPICAL.get(name, 0.5) for name in problem.scalars], device=draw.device),
        "counts": torch.tensor([TAKEN, SKIPPED, 1.0], device=draw.device),
    }
    for tensor, size in enumerate(problem.sizes):
        parameter, gradient, *state = problem.read(tensor)
        inputs[parameter] = draw.normal(size)
        inputs[gradient] = draw.normal(size).to(STORAGE[problem.gradient_type(tensor)])
        inputs |= {name: draw.uniform(size) for name in state}
    return inputs


def empty_output(problem: OptimizerStepProblem, device: torch.device) -> torch.Tensor:
    return torch.empty(problem.sizes[0], device=device)


def extra_outputs(problem: OptimizerStepProblem, device: torch.device) -> dict[str, torch.Tensor]:
    """Other parameters, state, copies, and `counted`: steps taken, steps skipped, and 1 if this one was."""
    made = {"counted": torch.empty(3, device=device)}
    for tensor, size in enumerate(problem.sizes):
        for name in problem.written(tensor):
            copied = problem.copy and name.startswith("copy")
            made[name] = torch.empty(size, device=device, dtype=STORAGE[problem.copy if copied else "fp32"])
    del made["y"]
    return made


def exact(problem: OptimizerStepProblem, inputs: Tensors) -> torch.Tensor:
    return _results(problem, inputs, 0, torch.float64)[0]


def extra_references(problem: OptimizerStepProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
    """All other results in float64, copies rounded to their type."""
    counted = torch.tensor([TAKEN + 1, SKIPPED, 0.0], dtype=torch.float64, device=inputs["counts"].device)
    found = {"counted": counted}
    for tensor in range(len(problem.sizes)):
        results = _results(problem, inputs, tensor, torch.float64)
        copies = (results[0].to(STORAGE[problem.copy]).double(),) if problem.copy else ()
        found |= dict(zip(problem.written(tensor), (*results, *copies), strict=True))
    del found["y"]
    return found


def peer(problem: OptimizerStepProblem, inputs: Tensors) -> torch.Tensor:
    return _results(problem, inputs, 0, torch.float32)[0]


def _results(
    problem: OptimizerStepProblem, inputs: Tensors, tensor: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    arrays = zip((PARAMETER, GRADIENT, *problem.state), problem.read(tensor), strict=True)
    given = {name: inputs[buffer].to(dtype) for name, buffer in arrays}
    given |= dict(zip(problem.scalars, inputs["scalars"].to(dtype), strict=True))
    given[STEP] = inputs["counts"][0].to(dtype) + 1
    return problem.program.evaluate(given)


# --- the operation


class OptimizerStepOperation(Operation[OptimizerStepProblem]):
    name = "optimizer_step"
    problem = OptimizerStepProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("optimizer_step", RUNGS)
    problems = (
        of(MOMENTUM, AUTOENCODER),
        of(ADAMW, AUTOENCODER),
        of(MOMENTUM, RESNET18),
        of(ADAMW, RESNET18),
        of(ADAMW.scaled(), RESNET18, "fp16", checked=True),
    )
    """Parameters of a convolutional autoencoder and of ResNet-18, the last with a loss scale and fp16 weights."""
    small_problems = (
        of(sgd(), (1, 9, 4100)),
        of(sgd(momentum=0.9, dampening=0.1, weight_decay=1e-4, maximize=True), (2049, 64)),
        of(ADAMW.scaled(), (64, 3, 1027), "fp16", checked=True),
        of(adam(weight_decay=1e-2, amsgrad=True), (36,)),
        of(MOMENTUM.scaled(), (1027, 4100, 5), checked=True, wide=2),
    )
    """Small problems: tensors of several chunks, of part of one and of part of a pack; no state and three; a copy and a
    check; some gradients in fp32."""
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: OptimizerStepProblem) -> tuple[str, ...]:
        return ("vectorised",)

    def extra_outputs(self, problem: OptimizerStepProblem, device: torch.device) -> dict[str, torch.Tensor]:
        return extra_outputs(problem, device)

    def extra_references(self, problem: OptimizerStepProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        return extra_references(problem, inputs)


OPTIMIZER_STEP = OptimizerStepOperation()


# --- the PyTorch operator


PROGRESS = 8
"""Elements of `progress`: steps taken, steps skipped, 1 if the last was skipped, and from the fifth on scratch of the
kernels."""
_COUNTS, _MEETING_OP = 3, 4


def no_progress(device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the `progress` of an optimizer before its first step.

    Its first two elements count the steps taken and skipped; the third is 1 if the last was skipped, the format of
    `torch._amp_update_scale_` for the next loss scale.
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
    """Run one optimizer step over all parameters in one launch, in place.

    Parameters and state (a list per name of the rule's state, zeros at first) are float32. Gradients are float32,
    float16 or bfloat16; in a list with float32 and another type, those of float32 are last. `scalars` are the rule's
    (`Rule.scalars`) and `progress` comes from `no_progress`. Both are on the device, and their contents may change
    between steps, even in a CUDA graph. `copies`, float16 or bfloat16, receive the new parameters too. A `checked` step
    changes only its count if any gradient is not finite. Deterministic. `rung` names a rung of the ladder.
    """
    if not isinstance(rule, Rule) or not isinstance(state, Mapping):
        raise UnsupportedError(
            f"rule is {type(rule).__name__} and state is {type(state).__name__}: optimizer_step needs a Rule, and a "
            "mapping from the names of its state to tensors"
        )
    if set(state) != set(rule.state):
        raise UnsupportedError(
            f"state is {', '.join(state) or 'empty'}: the rule needs {', '.join(rule.state) or 'none'}"
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
    checked: bool = False,
    rung: str | None = None,
) -> OptimizerStepProblem:
    if not parameters or len(gradients) != len(parameters):
        raise UnsupportedError(
            f"{len(parameters)} parameters and {len(gradients)} gradients: pass at least one, and equally many of both"
        )
    if len(state) != len(names) * len(parameters) or len(copies) not in (0, len(parameters)):
        raise UnsupportedError(
            f"{len(parameters)} parameters, {len(state)} state tensors and {len(copies)} copies: each parameter needs "
            f"{', '.join(names) or 'no state'}, and either all have a copy or none"
        )
    narrow = [gradient for gradient in gradients if gradient.dtype != torch.float32]
    if narrow and any(gradient.dtype != torch.float32 for gradient in gradients[len(narrow) :]):
        raise UnsupportedError(
            "gradients of torch.float32 before those of another dtype: pass parameters with float32 gradients last"
        )
    problem = OptimizerStepProblem(
        tuple(parameter.numel() for parameter in parameters),
        expression,
        tuple(names),
        _dtype("copies", copies) if copies else "",
        checked,
        _dtype("gradients", narrow or gradients),
        wide=len(gradients) - len(narrow) if narrow else 0,
    )
    _check_overwritten(parameters, state, copies)
    for name, tensor, length in (
        ("scalars", scalars, len(problem.scalars)),
        ("progress", progress, PROGRESS),
    ):
        if tensor.dtype != torch.float32 or tensor.shape != (length,) or not tensor.is_contiguous():
            raise UnsupportedError(
                f"{name} is {tensor.dtype} of {list(tensor.shape)}: it must be dense float32 of {length} elements"
                + (f", {', '.join(problem.scalars)}" if name == "scalars" else "")
            )
    for name, tensors in {"gradients": gradients, "scalars": [scalars], "progress": [progress]}.items():
        for tensor in tensors:
            require_same_device(parameters[0], name, tensor)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient.shape != parameter.shape:
            raise UnsupportedError(
                f"a gradient of {list(gradient.shape)} for a parameter of {list(parameter.shape)}: shapes must match"
            )
    return problem


def _dtype(name: str, tensors: list[torch.Tensor]) -> str:
    if len({tensor.dtype for tensor in tensors}) != 1:
        given = sorted({str(tensor.dtype) for tensor in tensors})
        raise UnsupportedError(f"{name} of {' and '.join(given)}: all must have one dtype")
    return NAMES[tensors[0].dtype] if tensors[0].dtype in NAMES else dtype_of("optimizer_step", tensors[0])


def _check_overwritten(
    parameters: list[torch.Tensor], state: list[torch.Tensor], copies: list[torch.Tensor]
) -> None:
    """Raise unless all overwritten tensors are dense and have the strides of their parameter."""
    for parameter in parameters:
        if not (parameter.is_contiguous() or parameter.stride() == torch.empty_like(parameter).stride()):
            raise UnsupportedError(
                f"a parameter of {list(parameter.shape)} with strides {list(parameter.stride())}: optimizer_step needs "
                "dense parameters, without gaps"
            )
    shapes = [(parameter.shape, parameter.stride()) for parameter in parameters]
    for name, group in {"parameters": parameters, "state": state, "copies": copies}.items():
        for number, tensor in enumerate(group):
            shape, stride = shapes[number % len(shapes)]
            if tensor.shape != shape or tensor.stride() != stride:
                raise UnsupportedError(
                    f"{name} of {list(tensor.shape)} with strides {list(tensor.stride())}, where a parameter has "
                    f"{list(shape)} and {list(stride)}: they must match"
                )
            if tensor.dtype != torch.float32 and group is not copies:
                raise UnsupportedError(f"{name} are {tensor.dtype}; optimizer_step needs torch.float32")
            require_same_device(parameters[0], name, tensor)


def _run(*arguments: Any) -> None:
    problem = _problem(*arguments)
    parameters, gradients, state, copies, scalars, progress = arguments[:6]
    rung = arguments[9] if len(arguments) > 9 else None
    require_rung(OPTIMIZER_STEP, rung)
    counts, meeting = progress[:_COUNTS], progress[_MEETING_OP:]
    tensors = {"scalars": scalars, "counts": counts, "counted": counts, "meeting": meeting}
    for tensor, arrays in enumerate(_by_parameter(parameters, state, copies)):
        parameter, kept, copied = arrays
        gradient = _with_strides_of(gradients[tensor], parameter)
        tensors |= zip(problem.read(tensor), (parameter, gradient, *kept), strict=True)
        tensors |= zip(problem.written(tensor), (parameter, *kept, *copied), strict=True)
    prepare_rung(OPTIMIZER_STEP, problem, scalars.device, rung).run(tensors)


def _with_strides_of(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient with the parameter's strides, copied if necessary."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def _by_parameter(
    parameters: list[torch.Tensor], state: list[torch.Tensor], copies: list[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]]:
    count = len(parameters)
    for number, parameter in enumerate(parameters):
        yield parameter, state[number::count], copies[number : number + 1]


def _fake(*arguments: Any) -> None:
    _problem(*arguments)


OPERATOR = define_in_place(
    "optimizer_step(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] state, Tensor(c!)[] copies, "
    "Tensor scalars, Tensor(d!) progress, str expression, str[] names, bool checked=False, str? rung=None) -> ()",
    _run,
    _fake,
)
