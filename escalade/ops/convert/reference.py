"""What a conversion's result is, and PyTorch's own answer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.convert.problem import ConvertProblem
from escalade.ops.shared.images import empty_images


def random_inputs(problem: ConvertProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """x has three dimensions, in the order in which it lies in memory: its layout is the problem's alone."""
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)
    rest = (p.stored_channels, p.pixels) if p.source_layout == "nchw" else (p.pixels, p.stored_channels)
    if p.source == "uint8":
        x = torch.randint(0, 256, (p.batch, *rest), generator=generator, device=device, dtype=torch.uint8)
    else:
        x = torch.randn((p.batch, *rest), generator=generator, device=device).to(STORAGE[p.source])
    if not p.normalise:
        return {"x": x}
    scale, shift = torch.randn((2, p.channels), generator=generator, device=device)
    return {"x": x, "scale": scale.contiguous(), "shift": shift.clone()}


def empty_output(problem: ConvertProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.batch, p.padded_channels, p.height, p.width), device)


def logical(problem: ConvertProblem, x: torch.Tensor) -> torch.Tensor:
    """The channels that are taken, as [N, C, H, W]; of an x that is in this order already, whatever its strides."""
    p = problem
    if x.dim() != 4:
        if p.source_layout == "nchw":
            x = x.view(p.batch, p.stored_channels, p.height, p.width)
        else:
            x = x.view(p.batch, p.height, p.width, p.stored_channels).permute(0, 3, 1, 2)
    if p.ways > 1:
        channel = torch.arange(p.channels, device=x.device)
        return x.index_select(1, channel // p.ways + channel % p.ways * p.step)
    return x[:, : p.channels]


def _normalised(
    problem: ConvertProblem, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    x = logical(problem, inputs["x"])
    if not problem.normalise:
        return x
    scale, shift = (inputs[name].to(dtype)[:, None, None] for name in ("scale", "shift"))
    return x.to(dtype) * scale + shift


def exact(problem: ConvertProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The converted tensor in float64."""
    p = problem
    y = torch.zeros(
        (p.batch, p.padded_channels, p.height, p.width), dtype=torch.float64, device=inputs["x"].device
    )
    y[:, : p.channels] = _normalised(p, inputs, torch.float64)
    return y


def peer(problem: ConvertProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One copy that changes type and layout at once, into zeros where channels are added."""
    y = empty_output(problem, inputs["x"].device)
    if problem.padded_channels > problem.channels:
        y.zero_()
    y[:, : problem.channels].copy_(_normalised(problem, inputs, torch.float32))
    return y
