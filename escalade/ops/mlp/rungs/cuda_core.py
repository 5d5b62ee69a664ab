"""The perceptron on CUDA cores: a launch for each step, then a block an item."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.ops.base.dtypes import ELEMENT_BYTES, element, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.mlp.problem import ACTIVATIONS, MlpProblem
from escalade.ops.mlp.rungs import chain
from escalade.ops.mlp.rungs.chain import ChainRung
from escalade.ops.mlp.rungs.gelu import gelu_constants, gelu_forms


@dataclass(frozen=True)
class Layers(Rung[MlpProblem]):
    def supports(self, problem: MlpProblem) -> str | None:
        rows = problem.batch * max(layer.groups for layer in problem.layers)
        if rows >= 2**31:
            return (
                f"{self.name} counts rows in 32 bits, and here are {rows} groups of features; split the batch"
            )
        return None

    def configs(self, problem: MlpProblem) -> tuple[Config, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128, 64))

    def recipe(self, problem: MlpProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        p = problem
        steps = _Steps(p.dtype, config.threads)
        value = "x"
        for number, layer in enumerate(p.layers):
            rows = p.batch * layer.groups
            if layer.norm:
                target = _other(value)
                steps.norm(number, value, target, rows, layer.features, layer.epsilon)
                value = target
            last = number == len(p.layers) - 1 and p.output == "y"
            target = "y" if last else _other(value)
            steps.linear(number, layer.bias, (value, target), (rows, layer.features, layer.outputs))
            value = target
            if layer.activation != "none":
                steps.activate(value, layer.activation, rows * layer.outputs)
        if p.output == "error":
            steps.error(value, p.batch, p.features)
        size = max(1, p.batch * chain.widest(p.layers) * ELEMENT_BYTES[p.dtype])
        return Recipe(tuple(steps.calls), (Workspace("hidden0", size), Workspace("hidden1", size)))


def _other(buffer: str) -> str:
    return "hidden1" if buffer == "hidden0" else "hidden0"


class _Steps:
    """The launches, one after another."""

    def __init__(self, dtype: str, threads: int) -> None:
        self.calls: list[KernelCall] = []
        self._threads = threads
        self._element = element(dtype)

    def _launch(
        self,
        source: str,
        entry: str,
        constants: dict[str, Constant],
        work: int,
        *arguments: Buffer | int | Int64 | float,
    ) -> None:
        program = Program.of(source, entry, {"Element": self._element, **constants})
        grid = (blocks(work, self._threads), 1, 1)
        self.calls.append(KernelCall(program, grid, (self._threads, 1, 1), arguments, overlap=True))

    def norm(self, number: int, source: str, target: str, rows: int, features: int, epsilon: float) -> None:
        scale, shift = Buffer(f"norm_weight{number}"), Buffer(f"norm_bias{number}")
        self._launch(
            "mlp/layer_norm.cu", "mlp_layer_norm", {}, rows,
            Buffer(source), scale, shift, Buffer(target), Int64(rows), features, epsilon,
        )  # fmt: skip

    def linear(self, number: int, bias: bool, buffers: tuple[str, str], sizes: tuple[int, int, int]) -> None:
        """Adds a layer by the foot of linear's ladder."""
        source, target = buffers
        self._launch(
            "linear/naive.cu", "linear_naive", {"HAS_BIAS": bias, "HAS_RELU": False, "PIXELS": 1}, sizes[0] * sizes[2],
            Buffer(source), Buffer(f"weight{number}"), Buffer(f"bias{number}", optional=True), Buffer(target), *sizes,
        )  # fmt: skip

    def activate(self, name: str, activation: str, elements: int) -> None:
        constants: dict[str, Constant] = {
            "ACTIVATION": ACTIVATIONS.index(activation),
            **gelu_constants("erf"),
        }
        self._launch("mlp/activate.cu", "mlp_activate", constants, elements, Buffer(name), Int64(elements))

    def error(self, reconstruction: str, rows: int, features: int) -> None:
        self._launch(
            "mlp/error.cu", "mlp_error", {}, rows,
            Buffer("x"), Buffer(reconstruction), Buffer("y"), rows, features,
        )  # fmt: skip


@dataclass(frozen=True)
class FusedConfig(Config):
    threads: int
    """Threads of a block, which has one item."""
    gelu: str
    """One of `gelu_forms`."""


_MOST_THREADS = 512


@dataclass(frozen=True)
class Fused(ChainRung):
    warp_reductions: bool = False
    vectorised: bool = False

    def shared_bytes(self, problem: MlpProblem) -> int:
        return 4 * (2 * _padded(chain.widest(problem.layers)) + _MOST_THREADS)

    def configs(self, problem: MlpProblem) -> tuple[Config, ...]:
        """A thread an output of the widest layer, or a part of it."""
        widest = max(layer.width_out for layer in problem.layers)
        suited = sorted((64, 128, 256, _MOST_THREADS), key=lambda threads: abs(threads - min(widest, 256)))
        return tuple(
            FusedConfig(threads, gelu) for gelu, threads in product(gelu_forms(problem.dtype), suited[:3])
        )

    def recipe(self, problem: MlpProblem, config: Config) -> Recipe:
        assert isinstance(config, FusedConfig)
        p = problem

        def vector(*lengths: int) -> int:
            return widest_vector(p.dtype, *lengths) if self.vectorised else 1

        layers = [chain.spell(p, number, vector(layer.features)) for number, layer in enumerate(p.layers)]
        constants: dict[str, Constant] = {
            **chain.constants(p, layers),
            **gelu_constants(config.gelu),
            "THREADS": config.threads,
            "WIDTH": _padded(chain.widest(p.layers)),
            "WARP_REDUCTIONS": self.warp_reductions,
            "VECTOR_IN": vector(p.features),
            "VECTOR_OUT": vector(p.outputs),
        }
        call = KernelCall(
            Program.of("mlp/fused.cu", "mlp_fused", constants),
            (p.batch, 1, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("y"), *chain.parameters(p)),
            shared_bytes=self.shared_bytes(p),
            overlap=True,
        )
        return Recipe((call,))


def _padded(floats: int) -> int:
    """The size filled up to whole packs of 16 bytes."""
    return 4 * blocks(floats, 4)


# Predictions are for the spectral autoencoder at batch 512 in fp32: 62,464 multiply-adds an item, 119 KB of weights.
LAYERS = Layers(
    "layers", "one naive launch for each step of each layer: norm, product, activation, error", None, None
)
FUSED = Fused(
    "fused",
    "one launch, a block an item: what lies between layers stays in shared memory",
    below="layers",
    # Nine launches with a tail of about 5 us each, 45 us; one launch whose 512 blocks, 4 to a multiprocessor, wait for
    # their weights: 4 x 62,464 loads of 32 sectors a warp, some 8000 requests a multiprocessor at 0.5 a clock, 10 us.
    predicted_gain=4.0,
)
WARP_REDUCTIONS = Fused(
    "warp_reductions",
    "norms and the error by shuffles, a warp a group, instead of by a tree with a barrier a level",
    below="fused",
    # Five groups one after another with 2 x 10 barriers of some 30 clocks each, 3000 of 18,000 clocks.
    predicted_gain=1.2,
    warp_reductions=True,
)
VECTORISED = Fused(
    "vectorised",
    "weights and activations read 16 bytes at a time, the products unrolled",
    below="warp_reductions",
    # A quarter of the loads, each with the sectors that four had: half of the time.
    predicted_gain=2.0,
    warp_reductions=True,
    vectorised=True,
)
