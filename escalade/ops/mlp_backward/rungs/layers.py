"""Gradients with one kernel per step of each layer; supports every size."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program, Type
from escalade.device.recipe import Argument, Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import element
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Rung, ThreadsConfig
from escalade.ops.mlp.problem import ACTIVATIONS, Layer
from escalade.ops.mlp_backward.problem import MlpBackwardProblem

PARTS = "parts"
_SUM_LANES = 8
_MOST_PARTS = 64
_FLOAT = Type("float")


def sum_parts(count: int, pitch: int, elements: int) -> KernelCall:
    """Return the launch that adds up `count` partial sums, `pitch` elements apart, into the first `elements` of y."""
    return KernelCall(
        Program.of("mlp_backward/sum_parts.cu", lanes=_SUM_LANES),
        (ceil_div(elements, 32), 1, 1),
        (32 * _SUM_LANES, 1, 1),
        (Buffer(PARTS), Buffer("y"), count, Int64(pitch), Int64(elements)),
        overlap=True,
    )


@dataclass(frozen=True)
class Layers(Rung[MlpBackwardProblem, ThreadsConfig]):
    def supports(self, problem: MlpBackwardProblem) -> str | None:
        widest = max(max(layer.width_in, layer.width_out) for layer in problem.layers)
        if problem.batch * widest >= 2**37:  # CTAs of 64 threads
            return f"{self.name} takes fewer than 2^37 elements per step, not {problem.batch} rows of {widest} features"
        return None

    def configs(self, problem: MlpBackwardProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128, 64))

    def recipe(self, problem: MlpBackwardProblem, config: ThreadsConfig) -> Recipe:
        return _Steps(problem, config.threads, self.card).recipe()


class _Steps:
    """Builder of the launches, forward and then backward, and of their workspaces."""

    def __init__(self, problem: MlpBackwardProblem, threads: int, card: Card) -> None:
        self._problem = problem
        self._threads = threads
        self._calls: list[KernelCall] = []
        self._workspaces: dict[str, int] = {}
        # Enough parts of the rows to fill the card, but not so many that the reduction dominates.
        wanted = ceil_div(card.busy_blocks * 256, problem.parameter_elements)
        self._parts = max(1, min(_MOST_PARTS, wanted, ceil_div(problem.batch, 16)))

    def recipe(self) -> Recipe:
        p = self._problem
        for number in range(len(p.layers)):
            self._forward(number)
        gradient, stored = self._last_gradient()
        for number in reversed(range(len(p.layers))):
            gradient, stored = self._backward(number, gradient, stored), _FLOAT
        if self._parts > 1:
            self._workspaces[PARTS] = 4 * self._parts * p.parameter_elements
            self._calls.append(sum_parts(self._parts, p.parameter_elements, p.parameter_elements))
        workspaces = tuple(Workspace(name, size) for name, size in self._workspaces.items())
        return Recipe(tuple(self._calls), workspaces)

    def _keep(self, name: str, number: int, elements: int) -> Buffer:
        """Add an fp32 workspace."""
        self._workspaces[f"{name}{number}"] = 4 * elements
        return Buffer(f"{name}{number}")

    def _slope(self, number: int) -> Buffer:
        """Return the derivative of a layer's activation; there is none before the first."""
        return Buffer(f"slope{number}", optional=True)

    def _input(self, number: int) -> tuple[Buffer, Type]:
        """Return the input of a layer's product, and its type."""
        if self._problem.layers[number].norm:
            return Buffer(f"hat{number}"), _FLOAT
        return self._before_norm(number)

    def _before_norm(self, number: int) -> tuple[Buffer, Type]:
        return (Buffer(f"value{number - 1}"), _FLOAT) if number else (Buffer("x"), self._element)

    @property
    def _element(self) -> Type:
        return element(self._problem.dtype)

    def _launch(
        self,
        name: str,
        constants: dict[str, Constant],
        threads: int,
        arguments: tuple[Argument, ...],
        parts: int = 1,
    ) -> None:
        self._calls.append(
            KernelCall(
                Program.of(
                    f"mlp_backward/layers_{name}.cu",
                    f"mlp_backward_layers_{name}",
                    {"Element": self._element, **constants},
                ),
                (ceil_div(threads, self._threads), parts, 1),
                (self._threads, 1, 1),
                arguments,
                overlap=True,
            )
        )

    def _forward(self, number: int) -> None:
        p, layer = self._problem, self._problem.layers[number]
        rows = p.batch * layer.groups
        if layer.norm:
            source, stored = self._before_norm(number)
            hat = self._keep("hat", number, rows * layer.features)
            rstd = self._keep("rstd", number, rows)
            self._launch(
                "normalise",
                {"Input": stored, "EPSILON": layer.epsilon},
                32 * rows,
                (source, hat, rstd, layer.features, Int64(rows)),
            )
        last = number == len(p.layers) - 1
        if last and layer.activation == "none":
            return
        elements = rows * layer.outputs
        if not last:
            self._keep("value", number, elements)
        if layer.activation != "none":
            self._keep("slope", number, elements)
        source, stored = self._input(number)
        self._launch(
            "forward",
            {
                "Input": stored,
                "HAS_NORM": layer.norm,
                "HAS_BIAS": layer.bias,
                "ACTIVATION": ACTIVATIONS.index(layer.activation),
                "KEEP_VALUE": not last,
            },
            elements,
            (
                source,
                Buffer(f"norm_weight{number}", optional=True),
                Buffer(f"norm_bias{number}", optional=True),
                Buffer(f"weight{number}"),
                Buffer(f"bias{number}", optional=True),
                Buffer(f"value{number}", optional=True),
                self._slope(number),
                layer.features,
                layer.outputs,
                Int64(elements),
            ),
        )

    def _last_gradient(self) -> tuple[Buffer, Type]:
        """Return the gradient of the last activation's input."""
        p, last = self._problem, len(self._problem.layers) - 1
        activation = p.layers[last].activation
        if activation == "none":
            return Buffer("grad_y"), self._element
        elements = p.batch * p.outputs
        result = self._keep("gradient", last, elements)
        self._launch(
            "slope",
            {"ACTIVATION": ACTIVATIONS.index(activation)},
            elements,
            (Buffer("grad_y"), self._slope(last), result, Int64(elements)),
        )
        return result, _FLOAT

    def _backward(self, number: int, gradient: Buffer, stored: Type) -> Buffer:
        """Add the gradients of a layer's parameters; return the gradient of the previous activation's input, if
        needed."""
        p, layer = self._problem, self._problem.layers[number]
        self._weight_gradient(number, gradient, stored)
        wanted = number > 0 or p.input_gradient
        if not (wanted or layer.norm):
            return gradient
        rows = p.batch * layer.groups
        elements = rows * layer.features
        before = p.layers[number - 1].activation if number else "none"
        slope: dict[str, Constant] = {"ACTIVATION": ACTIVATIONS.index(before)}
        if number:
            result = self._keep("gradient", number - 1, elements)
        else:
            result = Buffer("y", offset=4 * p.parameter_elements)
        normalised = self._keep("normalised", number, elements) if layer.norm else result
        self._launch(
            "input_gradient",
            {"Gradient": stored, **({"ACTIVATION": 0} if layer.norm else slope)},
            elements,
            (
                gradient,
                Buffer(f"weight{number}"),
                self._slope(number - 1),
                normalised,
                layer.features,
                layer.outputs,
                Int64(elements),
            ),
        )
        if layer.norm:
            self._norm_parameters(number, normalised)
        if layer.norm and wanted:
            self._launch(
                "norm_gradient",
                slope,
                32 * rows,
                (
                    normalised,
                    Buffer(f"hat{number}"),
                    Buffer(f"rstd{number}"),
                    Buffer(f"norm_weight{number}"),
                    self._slope(number - 1),
                    result,
                    layer.features,
                    Int64(rows),
                ),
            )
        return result

    def _part_rows(self, layer: Layer) -> tuple[int, int]:
        rows = self._problem.batch * layer.groups
        return rows, ceil_div(rows, self._parts)

    @property
    def _target(self) -> Buffer:
        return Buffer(PARTS if self._parts > 1 else "y")

    def _weight_gradient(self, number: int, gradient: Buffer, stored: Type) -> None:
        p, layer = self._problem, self._problem.layers[number]
        source, kept = self._input(number)
        rows, part_rows = self._part_rows(layer)
        self._launch(
            "weight_gradient",
            {"Gradient": stored, "Input": kept, "HAS_NORM": layer.norm, "HAS_BIAS": layer.bias},
            layer.outputs * (layer.features + layer.bias),
            (
                gradient,
                source,
                Buffer(f"norm_weight{number}", optional=True),
                Buffer(f"norm_bias{number}", optional=True),
                self._target,
                Int64(p.parameter_elements),
                Int64(p.offsets[f"weight{number}"]),
                Int64(p.offsets.get(f"bias{number}", 0)),
                layer.features,
                layer.outputs,
                Int64(rows),
                Int64(part_rows),
            ),
            self._parts,
        )

    def _norm_parameters(self, number: int, normalised: Buffer) -> None:
        p, layer = self._problem, self._problem.layers[number]
        rows, part_rows = self._part_rows(layer)
        self._launch(
            "norm_parameters",
            {},
            layer.features,
            (
                normalised,
                Buffer(f"hat{number}"),
                self._target,
                Int64(p.parameter_elements),
                Int64(p.offsets[f"norm_weight{number}"]),
                layer.features,
                Int64(rows),
                Int64(part_rows),
            ),
            self._parts,
        )


LAYERS = Layers("layers", "one plain kernel per step of each layer, forward and then backward", None, None)
