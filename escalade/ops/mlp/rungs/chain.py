"""A chain of layers as kernels see it (kernels/mlp/chain.cuh), and base class of the rungs that run it in one
launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from escalade.device.program import Constant, Macro
from escalade.device.recipe import Buffer
from escalade.ops.base.rung import C, Rung
from escalade.ops.mlp.problem import ACTIVATIONS, Layer, MlpProblem

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
