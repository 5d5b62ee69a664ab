"""`Tensor.data` as tracers can follow it: as a view without gradient, and as a copy into the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_READ, _WRITE = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]


class FollowData(TorchFunctionMode):
    """Replace reads and writes of `Tensor.data`, which PyTorch hides from everything that traces.

    Layers that mask their weights or keep them within bounds do `self.weight.data = renorm(self.weight.data)`.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function == _READ:
            return args[0].detach()
        if function == _WRITE:
            tensor, new = args
            if _has_form_of(new, tensor):
                with torch.no_grad():
                    tensor.copy_(new)
                return None
        return function(*args, **(kwargs or {}))


def _has_form_of(new: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (new.shape, new.dtype, new.device, new.layout) == (
        tensor.shape, tensor.dtype, tensor.device, tensor.layout,
    )  # fmt: skip
