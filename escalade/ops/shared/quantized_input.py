"""A quantized input of an operation that computes in wider dtypes: values of one byte, and one scale."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.base.checks import require
from escalade.ops.base.dtypes import LARGEST, QUANTIZED, STORAGE, stored_as
from escalade.ops.base.operation import Tensors

CHANNEL_UNIT = 16
"""Channels, or features, of which a multiple is read by words."""


def check_quantized(operation: str, x_dtype: str) -> None:
    if x_dtype:
        require(operation, "x_dtype", x_dtype, QUANTIZED)


def refuses_bytes(rung: str, x_dtype: str, channels: int) -> str | None:
    """Return why a rung that reads bytes by words does not support so many channels."""
    if not x_dtype or channels % CHANNEL_UNIT == 0:
        return None
    return f"{rung} reads {x_dtype} with a multiple of {CHANNEL_UNIT} channels, not {channels}"


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
