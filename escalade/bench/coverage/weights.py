"""Random weights with which a network's results say something of every layer."""

from __future__ import annotations

import math

import torch
from torch import nn

from escalade.models import settle

_SMALL = 1e-3
"""Up to here a constant is a factor that training begins with to leave a branch out."""


def enliven(model: nn.Module, x: torch.Tensor) -> None:
    """Fills in what is left constant for training to begin with, and settles BatchNorm on these inputs.

    A classifier of zeros (vision transformers'), or a branch that counts for a millionth (ConvNeXt's), would hide
    whatever goes wrong in front of it.
    """
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                    _fill(module, name, parameter)
    settle(model, x)


def _fill(module: nn.Module, name: str, parameter: torch.Tensor) -> None:
    value = abs(float(parameter.flatten()[0]))
    if "Norm" in type(module).__name__ and name == "weight":
        parameter.uniform_(0.5, 1.5)
    elif 0 < value <= _SMALL:
        parameter.uniform_(0.1, 0.5)
    elif value == 0 and isinstance(module, nn.Linear | nn.Conv2d) and name == "weight":
        parameter.normal_(0, 1 / math.sqrt(parameter[0].numel()))
    elif value == 0:
        parameter.normal_(0, 0.1)
