"""The perceptron on CUDA cores, one launch per step."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.ops.base.dtypes import ELEMENT_BYTES, element
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Rung, ThreadsConfig
from escalade.ops.mlp.problem import ACTIVATIONS, MlpProblem
from escalade.ops.mlp.rungs import chain
from escalade.ops.mlp.rungs.gelu import gelu_constants


@dataclass(frozen=True)
class Layers(Rung[MlpProblem, ThreadsConfig]):
    def supports(self, problem: MlpProblem) -> str | None:
        rows = problem.batch * max(layer.groups for layer in problem.layers)
        if rows >= 2**31:
            return f"{self.name} counts rows in 32 bits, not {rows} groups of features; split the batch"
        return None

    def configs(self, problem: MlpProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128, 64))

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
        size = max(1, p.batch * chain.widest(p.layers) * ELEMENT_BYTES[p.dtype])
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
