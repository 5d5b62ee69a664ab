"""A quantized input of an operation that computes in wider dtypes: values of one byte, and one scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from escalade.device.architecture import WITH_FP8
from escalade.ops.base.checks import require
from escalade.ops.base.dtypes import LARGEST, QUANTIZED, STORAGE, stored_as
from escalade.ops.base.operation import Tensors
from escalade.ops.base.rung import Rung

CHANNEL_UNIT = 16
"""Channels, or features, per 32-bit word."""


def check_quantized(operation: str, x_dtype: str) -> None:
    if x_dtype:
        require(operation, "x_dtype", x_dtype, QUANTIZED)


def refuses_bytes(rung: Rung[Any, Any], x_dtype: str, channels: int = 0) -> str | None:
    """Return why a rung cannot read a quantized x; `channels` is 0 for rungs that read bytes instead of words."""
    here = rung.card.architecture
    if x_dtype == "fp8" and here is not None and here not in WITH_FP8:
        return f"{rung.name} reads fp8 on {', '.join(WITH_FP8)}; this GPU is {here}"
    if not x_dtype or channels % CHANNEL_UNIT == 0:
        return None
    return f"{rung.name} reads {x_dtype} with a multiple of {CHANNEL_UNIT} channels, not {channels}"


def quantized_input(inputs: Mapping[str, torch.Tensor], x_dtype: str) -> dict[str, torch.Tensor]:
    """Return random inputs whose x is quantized, with its scale."""
    if not x_dtype:
        return dict(inputs)
    x, largest = inputs["x"], LARGEST[x_dtype]
    codes = stored_as(x.float() * (largest / 4), STORAGE[x_dtype])
    return {**inputs, "x": codes, "scale": torch.tensor([4 / largest], device=x.device)}


def dequantized(inputs: Tensors) -> torch.Tensor:
    """Return x in the dtype of its values or of its scale."""
    if "scale" not in inputs:
        return inputs["x"]
    return inputs["x"].to(inputs["scale"].dtype) * inputs["scale"]
