"""Resolve the option `--device` to a device."""

from __future__ import annotations

import torch

from escalade.errors import UnsupportedError


def kernel_device(name: str | None) -> torch.device:
    """Return the GPU for `cuda` (the default if there is one), the CPU for `twin`."""
    if name == "twin" or (name is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    return _gpu("--device twin runs the same kernels on the CPU")


def network_device(name: str | None) -> torch.device:
    """Return the GPU for `cuda` (the default if there is one), else the CPU."""
    if name == "cpu" or (name is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    return _gpu("--device cpu runs PyTorch's operators instead of kernels")


def engine_device(name: str | None) -> str:
    """Return the `device` argument of `compile`: the name, or by default `cuda` if there is a GPU, else `cpu`."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        _gpu("--device cpu runs PyTorch's operators")
    return str(name)


def _gpu(instead: str) -> torch.device:
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "--device cuda needs an NVIDIA GPU that PyTorch can use, and none was found; `escalade doctor` reports "
            f"why. {instead}"
        )
    return torch.device("cuda", torch.cuda.current_device())
