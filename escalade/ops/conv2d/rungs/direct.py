"""Direct convolution on CUDA cores, from one thread per output to register-blocked tiles, one idea per rung."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from escalade.device.program import Program
from escalade.device.recipe import Buffer, ConstantCopy, KernelCall, Recipe
from escalade.ops.base.rung import Rung, ThreadsConfig
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.direct_config import (
    CONSTANT_LIMIT,
    WEIGHTS,
    DirectConfig,
    candidates,
    constant_bytes,
    efficiency,
    fitted,
    tile,
)
from escalade.ops.conv2d.rungs.rung import Conv2dRung
from escalade.ops.shared import activation, prologue

NAIVE_RATE = 2.0e6
"""FLOPs per microsecond with one thread per output, if adjacent threads read adjacent inputs."""
SCATTERED_RATE = 0.5e6
"""FLOPs per microsecond with one thread per output in NHWC, where the inputs of adjacent threads are far apart, from
`SCATTERED` channels on."""
SCATTERED = 16
MEASURED = 3.3
"""Largest measured / modeled time over odd shapes in a random sweep; a high estimate keeps the last resort last."""
STEP_CLOCKS = 40
"""Clocks per product for a thread with nothing to hide latency: operands come from L1 (estimate)."""
REACHED = 0.92
"""Measured / modeled efficiency."""
ENDS_US = 15.0
"""Microseconds of a tile's first loads and last stores with no other CTAs to hide them, from the time of one image."""


@dataclass(frozen=True)
class Direct(Conv2dRung[ThreadsConfig]):
    """One thread per output; supports every problem."""

    last_resort = True
    takes_groups = True
    supports_prologue = True

    def configs(self, problem: Conv2dProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128, 512))

    def estimate(self, problem: Conv2dProblem, config: ThreadsConfig) -> float:
        coalesced = problem.layout == "nchw" or problem.group_channels < SCATTERED
        alone = problem.depth * STEP_CLOCKS / self.card.rates.clock
        sums = problem.flops / ((NAIVE_RATE if coalesced else SCATTERED_RATE) * self.card.speed)
        return self.card.rates.launch_us + MEASURED * (alone + sums + self.card.transfer_us(problem.traffic))

    def recipe(self, problem: Conv2dProblem, config: ThreadsConfig) -> Recipe:
        generated = prologue.constants(problem) | activation.constants_of(problem)
        call = KernelCall(
            Program.of("conv2d/direct.cu", constants=generated, problem=problem),
            (-(-problem.output_elements // config.threads), 1, 1),
            (config.threads, 1, 1),
            (*arguments.tensors(), *prologue.tensors(), arguments.shape(problem)),
            overlap=True,
        )
        return Recipe((call,))


IDEAS = {
    "input_tile": {"input_tile": True},
    "weight_tile": {"weights": "shared"},
    "constant_weights": {"weights": "constant"},
    "padded_tile": {"padded": True},
    "vector_loads": {"vector": True},
    "register_blocking": {"run": 4, "runs": 2, "outputs_k": 8, "columns": 16, "filter_threads": 8},
    "restrict": {"restrict": True},
    "unrolled": {"unrolled": True},
}
"""Config fields set by each idea. `tuned` chooses all others for the problem."""


@dataclass(frozen=True)
class Tiled(Conv2dRung[DirectConfig]):
    """One CTA per tile of outputs, with the optimizations named in `ideas`."""

    ideas: tuple[str, ...]
    layouts: tuple[str, ...] = field(default=("nchw",), kw_only=True)

    def limits(self, problem: Conv2dProblem) -> str | None:
        if "constant_weights" in self.ideas and constant_bytes(problem) > CONSTANT_LIMIT:
            return (
                f"weights and bias take {constant_bytes(problem)} bytes; {self.name} keeps them in constant "
                f"memory, which has {CONSTANT_LIMIT}"
            )
        if fitted(problem, self._switches()) is None:
            return f"{self.name} keeps the inputs of an output in shared memory; they do not fit. `direct` takes any"
        return None

    def configs(self, problem: Conv2dProblem) -> tuple[DirectConfig, ...]:
        base = fitted(problem, self._switches())
        assert base is not None, "configs() requires a supported problem"
        if "tuned" in self.ideas and "register_blocking" in self.ideas:
            return candidates(problem, self._switches(), self.card) or (base,)
        return (base,)

    def estimate(self, problem: Conv2dProblem, config: DirectConfig) -> float | None:
        share = efficiency(problem, config, self.card) * REACHED
        if "tuned" not in self.ideas or not share:
            return None
        return ENDS_US + problem.flops / self.card.rates.fp32 / share + self.card.transfer_us(problem.traffic)

    def least(self, problem: Conv2dProblem) -> float:
        computing = problem.flops / self.card.rates.fp32
        if "tuned" not in self.ideas:  # without an estimate
            return ENDS_US + computing
        return ENDS_US + computing / REACHED + self.card.transfer_us(problem.traffic)

    def recipe(self, problem: Conv2dProblem, config: DirectConfig) -> Recipe:
        shape = tile(problem, config)
        program = Program.of(
            "conv2d/direct_tiled.cu",
            constants=activation.constants_of(problem),
            problem=problem,
            config=config,
            shape=shape,
            weights=WEIGHTS[config.weights],
        )
        copies = []
        if config.weights == "constant":
            size = problem.element_bytes
            copies.append(
                ConstantCopy(program, "constant_weights", Buffer("weight"), size * problem.weight_elements)
            )
            if problem.bias:
                copies.append(ConstantCopy(program, "constant_bias", Buffer("bias"), size * problem.filters))
        call = KernelCall(
            program,
            (config.blocks(problem), 1, 1),
            (config.threads, 1, 1),
            (*arguments.tensors(), arguments.shape(problem)),
            shared_bytes=shape.shared_bytes,
            overlap=True,
        )
        return Recipe((*copies, call))

    def without(self, idea: str) -> Tiled:
        """Return this rung with one of its ideas switched off."""
        ideas = tuple(other for other in self.ideas if other != idea)
        return replace(
            self,
            name=f"{self.name}-without-{idea}",
            summary=f"{self.name} without {idea}",
            below=None,
            predicted_gain=None,
            ideas=ideas,
        )

    def _switches(self) -> DirectConfig:
        config = DirectConfig(input_tile=False)
        for idea in self.ideas:
            config = replace(config, **IDEAS.get(idea, {}))  # type: ignore[arg-type]
        return config


_BLOCKED = ("input_tile", "weight_tile", "padded_tile", "vector_loads", "register_blocking")
_BOTH = ("nchw", "nhwc")

# Predictions for 64 to 64 channels, 56 x 56, batch 256, fp32, made before the first run.
RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Direct("direct", "one thread per output, everything read from global memory", None, None),
    Tiled("input_tile", "the inputs of a CTA are staged in shared memory, including the halo", "direct", 1.5,
          _BLOCKED[:1]),
    Tiled("constant_weights", "weights and bias are in constant memory", "input_tile", 1.2,
          ("input_tile", "constant_weights")),
    Tiled("weight_tile", "weights are staged in shared memory too", "input_tile", 1.2, _BLOCKED[:2]),
    Tiled("padded_tile", "rows of the input tile are padded to avoid bank conflicts",
          "weight_tile", 1.15, _BLOCKED[:3]),
    Tiled("vector_loads", "loads of up to 16 bytes from global to shared memory",
          "padded_tile", 1.1, _BLOCKED[:4]),
    Tiled("register_blocking", "a thread keeps 8 pixels x 8 filters in registers",
          "vector_loads", 6.0, _BLOCKED),
    Tiled("nhwc", "channels innermost: inputs and weights are loaded along channels",
          "register_blocking", 1.0, _BLOCKED, layouts=("nhwc",)),
    Tiled("restrict", "pointers are declared __restrict__",
          ("register_blocking", "nhwc"), 1.0, (*_BLOCKED, "restrict"), layouts=_BOTH),
    Tiled("unrolled", "taps are unrolled, and a row of inputs slides over them in registers", "restrict", 1.5,
          (*_BLOCKED, "restrict", "unrolled"), layouts=_BOTH),
    Tiled("tuned", "tile, outputs per thread and chunk of channels are chosen for the problem", "unrolled", 1.2,
          (*_BLOCKED, "restrict", "unrolled", "tuned"), layouts=_BOTH),
)  # fmt: skip


def ablations() -> dict[str, Rung[Conv2dProblem]]:
    """Return the top rung with one idea switched off, by idea."""
    top = RUNGS[-1]
    assert isinstance(top, Tiled)
    return {idea: top.without(idea) for idea in top.ideas}
