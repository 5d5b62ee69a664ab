"""`squeeze_excite` as a PyTorch operator."""

from __future__ import annotations

from typing import Any

import torch

from escalade.device.strides import aligned
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.executables import prepare_rung
from escalade.ops.calling.library import define, require_rung
from escalade.ops.shared.images import check_images, pack_aligned
from escalade.ops.squeeze_excite.operation import SQUEEZE_EXCITE
from escalade.ops.squeeze_excite.problem import SqueezeExciteProblem
from escalade.ops.squeeze_excite.reference import empty_output, gates

_ROLES = ("x", "weight", "bias", "gate_weight", "gate_bias")


def squeeze_excite(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    hidden: str = "relu(x)",
    gate: str = "sigmoid(x)",
    *,
    rung: str | None = None,
) -> torch.Tensor:
    """Return one factor per channel of each image [N, C, H, W] as [N, C]: two layers over the means of its channels.

    weight is [squeezed, C], gate_weight [C, squeezed]; `hidden` and `gate` are expressions in `x` applied after each
    layer. `rung` selects a rung of the ladder by name.
    """
    return OPERATOR(x, weight, bias, gate_weight, gate_bias, hidden, gate, rung)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
) -> None:
    check_images("squeeze_excite", x)
    channels, squeezed = x.shape[1], weight.shape[0] if weight.dim() else 0
    wanted = {
        "weight": (weight, [squeezed, channels]),
        "bias": (bias, [squeezed]),
        "gate_weight": (gate_weight, [channels, squeezed]),
        "gate_bias": (gate_bias, [channels]),
    }
    for name, (tensor, sizes) in wanted.items():
        if tensor is None:
            continue
        if tensor.dtype != x.dtype or tensor.device != x.device or list(tensor.shape) != sizes:
            raise UnsupportedError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; it must be {x.dtype} {sizes} on "
                f"{x.device}, like x"
            )


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    hidden: str,
    gate: str,
    rung: str | None = None,
) -> torch.Tensor:
    _check(x, weight, bias, gate_weight, gate_bias)
    batch, channels, height, width = x.shape
    problem = SqueezeExciteProblem(
        batch, channels, height, width, weight.shape[0], bias is not None, gate_bias is not None, hidden, gate,
        dtype_of("squeeze_excite", x),
    )  # fmt: skip
    y = empty_output(problem, x.device)
    if batch == 0:
        require_rung(SQUEEZE_EXCITE, rung)
        return y
    constants = {"weight": weight, "bias": bias, "gate_weight": gate_weight, "gate_bias": gate_bias}
    packed = {name: None if t is None else aligned(t.contiguous()) for name, t in constants.items()}
    prepare_rung(SQUEEZE_EXCITE, problem, x.device, rung).run(
        {"x": pack_aligned(x, "nhwc"), **packed, "y": y}
    )
    return y


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    hidden: str,
    gate: str,
    rung: str | None = None,
) -> torch.Tensor:
    _check(x, weight, bias, gate_weight, gate_bias)
    return x.new_empty(x.shape[:2])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.hidden, ctx.gate, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Let PyTorch recompute and differentiate the gates, which are small compared to x."""
    with torch.enable_grad():
        leaves = {
            role: tensor.detach().requires_grad_(needed)
            for role, tensor, needed in zip(_ROLES, ctx.saved_tensors, ctx.needs_input_grad, strict=False)
            if tensor is not None
        }
        y = gates(ctx.hidden, ctx.gate, leaves)
    inputs = {role: leaf for role, leaf in leaves.items() if leaf.requires_grad}
    found = dict(zip(inputs, torch.autograd.grad(y, tuple(inputs.values()), gradient), strict=True))
    return (*(found.get(role) for role in _ROLES), None, None, None)


OPERATOR = define(
    "squeeze_excite(Tensor x, Tensor weight, Tensor? bias, Tensor gate_weight, Tensor? gate_bias, str hidden, "
    "str gate, str? rung=None) -> Tensor",
    _run,
    _fake,
    setup=_setup,
    backward=_backward,
)
