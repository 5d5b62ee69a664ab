"""Rungs of mlp on CUDA cores, one launch per step or one CTA per row, and what all rungs share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from escalade.device.program import Constant, Macro, Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.ops.base.dtypes import ELEMENT_BYTES, element, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.launch import launch
from escalade.ops.base.rung import C, Config, Rung, ThreadsConfig, ThreadsRung
from escalade.ops.mlp.problem import ACTIVATIONS, Layer, MlpProblem

# --- a chain of layers as kernels see it, kernels/mlp/chain.cuh


MOST_LAYERS = 32
"""Largest number of layers; each is unrolled into the kernel."""


def constants(problem: MlpProblem, layers: Sequence[str]) -> dict[str, Constant]:
    """Return the lists of a chain's layers (initializers of the kernel's struct) and parameters."""
    names = tuple(problem.sizes)
    return {
        "LAYER_LIST": Macro(", ".join(layers)),
        "PARAMETER_LIST": Macro(", ".join(f"const Element* {name}" for name in names)),
        "PARAMETER_NAMES": Macro(", ".join(names)),
    }


def parameters(problem: MlpProblem) -> tuple[Buffer, ...]:
    """Return the arguments that PARAMETER_LIST declares."""
    return tuple(Buffer(name) for name in problem.sizes)


def spell(problem: MlpProblem, number: int, vector: int) -> str:
    """Return a layer as an initializer of kernels/mlp/chain.cuh."""
    layer = problem.layers[number]
    first = list(problem.sizes).index(f"{layer.parameters[0]}{number}")
    activation = ACTIVATIONS.index(layer.activation)
    flags = f"{str(layer.norm).lower()}, {str(layer.bias).lower()}"
    return (
        f"{{{layer.features}, {layer.outputs}, {layer.groups}, {flags}, {activation}, {layer.epsilon:.9e}f, {first}, "
        f"{vector}}}"
    )


def initializers(structs: Iterable[Sequence[int]]) -> Macro:
    return Macro(", ".join(f"{{{', '.join(map(str, fields))}}}" for fields in structs))


def widest(layers: Sequence[Layer]) -> int:
    """Return the widest row anywhere in the chain."""
    return max(max(layer.width_in, layer.width_out) for layer in layers)


@dataclass(frozen=True)
class ChainRung(Rung[MlpProblem, C]):
    """One launch for the whole chain, with intermediate values in shared memory."""

    def shared_bytes(self, problem: MlpProblem) -> int:
        """Return the least shared memory per CTA."""
        raise NotImplementedError

    def supports(self, problem: MlpProblem) -> str | None:
        if len(problem.layers) > MOST_LAYERS:
            return f"{self.name} takes up to {MOST_LAYERS} layers, not {len(problem.layers)}"
        needed = self.shared_bytes(problem)
        if needed > self.card.shared_bytes:
            return (
                f"{self.name} keeps a row in {needed} bytes of shared memory, but a CTA has {self.card.shared_bytes}; "
                "`layers` takes any width"
            )
        return None


# --- forms of GELU that a config can select


_FORMS = {
    "erf": ("gelu_erf", "gelu_tanh"),
    "fine": ("gelu_fine", "gelu_tanh_by_exp2"),
    "fitted": ("gelu_fitted", "gelu_tanh_by_exp2"),
    "tanh": ("gelu_tanh_approximate", "gelu_tanh_approximate"),
}
"""Functions of kernels/common/gelu.cuh for `gelu`, and for `gelu_tanh`."""


def gelu_constants(form: str) -> dict[str, Constant]:
    """Return the constants of kernels/mlp/activation.cuh."""
    gelu, gelu_tanh = _FORMS[form]
    return {"GELU": Macro(gelu), "GELU_TANH": Macro(gelu_tanh)}


def gelu_forms(dtype: str) -> tuple[str, ...]:
    """Return the forms whose error is below the rounding of the dtype (5e-6 fitted, 5e-4 by tanh), best first."""
    return {"fp32": ("fine", "erf"), "fp16": ("fitted", "erf"), "bf16": ("fitted", "erf", "tanh")}[dtype]


# --- rung layers: one launch per step


@dataclass(frozen=True)
class Layers(ThreadsRung[MlpProblem]):
    threads = (256, 128, 64)

    def supports(self, problem: MlpProblem) -> str | None:
        rows = problem.batch * max(layer.groups for layer in problem.layers)
        if rows >= 2**31:
            return f"{self.name} counts rows in 32 bits, not {rows} groups of features; split the batch"
        return None

    def recipe(self, problem: MlpProblem, config: ThreadsConfig) -> Recipe:
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
        size = max(1, p.batch * widest(p.layers) * ELEMENT_BYTES[p.dtype])
        return Recipe(tuple(steps.calls), (Workspace("hidden0", size), Workspace("hidden1", size)))


def _other(buffer: str) -> str:
    return "hidden1" if buffer == "hidden0" else "hidden0"


class _Steps:
    """Builder of the launches."""

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
            "mlp/layers_norm.cu", "mlp_layers_norm", {}, rows,
            Buffer(source), scale, shift, Buffer(target), Int64(rows), features, epsilon,
        )  # fmt: skip

    def linear(self, number: int, bias: bool, buffers: tuple[str, str], sizes: tuple[int, int, int]) -> None:
        """Add a layer by linear's naive kernel."""
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
        self._launch(
            "mlp/layers_activate.cu",
            "mlp_layers_activate",
            constants,
            elements,
            Buffer(name),
            Int64(elements),
        )

    def error(self, reconstruction: str, rows: int, features: int) -> None:
        self._launch(
            "mlp/layers_error.cu", "mlp_layers_error", {}, rows,
            Buffer("x"), Buffer(reconstruction), Buffer("y"), rows, features,
        )  # fmt: skip


LAYERS = Layers(
    "layers", "one naive launch per step of each layer: norm, product, activation, error", None, None
)


# --- rungs fused to vectorised: one launch, one CTA per row


@dataclass(frozen=True)
class FusedConfig(Config):
    threads: int
    """Threads per CTA, which has one row."""
    gelu: str
    """One of `gelu_forms`."""


_MOST_THREADS = 512


@dataclass(frozen=True)
class Fused(ChainRung[FusedConfig]):
    warp_reductions: bool = False
    vectorised: bool = False

    def shared_bytes(self, problem: MlpProblem) -> int:
        return 4 * (2 * _padded(widest(problem.layers)) + _MOST_THREADS)

    def configs(self, problem: MlpProblem) -> tuple[FusedConfig, ...]:
        """Return configs with about one thread per output of the widest layer."""
        widest = max(layer.width_out for layer in problem.layers)
        suited = sorted((64, 128, 256, _MOST_THREADS), key=lambda threads: abs(threads - min(widest, 256)))
        return tuple(
            FusedConfig(threads, gelu) for gelu, threads in product(gelu_forms(problem.dtype), suited[:3])
        )

    def recipe(self, problem: MlpProblem, config: FusedConfig) -> Recipe:
        p = problem

        def vector(*lengths: int) -> int:
            return widest_vector(p.dtype, *lengths) if self.vectorised else 1

        layers = [spell(p, number, vector(layer.features)) for number, layer in enumerate(p.layers)]
        program = Program.of(
            "mlp/fused.cu",
            constants=constants(p, layers) | gelu_constants(config.gelu),
            problem=p,
            config=config,
            rung=self,
            width=_padded(widest(p.layers)),
            vector_in=vector(p.features),
            vector_out=vector(p.outputs),
        )
        return launch(
            program,
            p.batch,
            config.threads,
            Buffer("x"), Buffer("y"), *parameters(p),
            shared_bytes=self.shared_bytes(p),
        )  # fmt: skip


def _padded(floats: int) -> int:
    """Round up to 16 bytes."""
    return 4 * blocks(floats, 4)


# Predictions for the spectral autoencoder at batch 512 in fp32: 62,464 multiply-adds per row, 119 KB of weights.
FUSED = Fused(
    "fused",
    "one launch, one CTA per row: intermediate values stay in shared memory",
    below="layers",
    # Nine launches with a tail of about 5 us each, 45 us; here one launch whose 512 CTAs, 4 per SM, wait for their
    # weights: 4 x 62,464 loads of 32 sectors per warp, some 8000 requests per SM at 0.5 per clock, 10 us.
    predicted_gain=4.0,
)
WARP_REDUCTIONS = Fused(
    "warp_reductions",
    "norms and the error by shuffles, one warp per group, instead of by a tree with a barrier per level",
    below="fused",
    # Five groups in sequence with 2 x 10 barriers of some 30 clocks each are 3000 of 18,000 clocks.
    predicted_gain=1.2,
    warp_reductions=True,
)
VECTORISED = Fused(
    "vectorised",
    "weights and activations read 16 bytes at a time, the products unrolled",
    below="warp_reductions",
    # A quarter of the loads, each of four times the sectors: half of the time.
    predicted_gain=2.0,
    warp_reductions=True,
    vectorised=True,
)
