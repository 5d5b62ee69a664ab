"""`optimizer_step` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors its kernels on the twin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import NAMES, dtype_of
from escalade.ops.calling.executables import ready
from escalade.ops.calling.library import define_in_place, require_rung, require_same_device
from escalade.ops.calling.types import listed
from escalade.ops.optimizer_step.operation import OPTIMIZER_STEP
from escalade.ops.optimizer_step.problem import OptimizerStepProblem
from escalade.ops.optimizer_step.rules import Rule

PROGRESS = 8
"""Elements of `progress`: steps taken, steps skipped, whether the last was, and from the fifth on what blocks leave
each other."""
_COUNTS, _MEETING = 3, 4


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
        listed(parameters), listed(gradients), kept, listed(copies), scalars, progress, rule.expression,
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
    counts, meeting = progress[:_COUNTS], progress[_MEETING:]
    tensors = {"scalars": scalars, "counts": counts, "counted": counts, "meeting": meeting}
    for tensor, arrays in enumerate(_by_parameter(parameters, state, copies)):
        parameter, kept, copied = arrays
        gradient = _lying_like(gradients[tensor], parameter)
        tensors |= zip(problem.read(tensor), (parameter, gradient, *kept), strict=True)
        tensors |= zip(problem.written(tensor), (parameter, *kept, *copied), strict=True)
    ready(OPTIMIZER_STEP, problem, scalars.device, rung).run(tensors)


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
