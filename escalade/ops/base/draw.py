"""Random tensors for references: all of a problem's inputs come from one seed."""

from __future__ import annotations

import torch

from escalade.device.strides import packed
from escalade.ops.base.dtypes import STORAGE
from escalade.ops.base.problem import Problem


class Draw:
    """Draws random tensors on a device, one after the other."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self._seed = device, seed
        self._generator = torch.Generator(device=device).manual_seed(seed)

    @property
    def next(self) -> Draw:
        """Draws of another seed, for inputs of another kind that must not repeat these."""
        return Draw(self.device, self._seed + 1)

    def normal(self, *sizes: int, scale: float = 1.0) -> torch.Tensor:
        """Return fp32 normal deviates."""
        return torch.randn(sizes, generator=self._generator, device=self.device, dtype=torch.float32).mul_(
            scale
        )

    def stored(self, problem: Problem, *sizes: int, scale: float = 1.0) -> torch.Tensor:
        """Return normal deviates as a problem stores them: in its dtype, and images in its layout."""
        layout = problem.layout if len(sizes) == 4 else "flat"
        return packed(self.normal(*sizes, scale=scale).to(STORAGE[problem.dtype]), layout)

    def uniform(self, *sizes: int) -> torch.Tensor:
        """Return fp32 numbers from 0 to 1."""
        return torch.rand(sizes, generator=self._generator, device=self.device, dtype=torch.float32)

    def integers(self, end: int, *sizes: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return whole numbers from 0 to end - 1."""
        return torch.randint(0, end, sizes, generator=self._generator, device=self.device, dtype=dtype)
