"""The update that ends a training step: accumulated, clipped and unscaled gradients, the optimizer, the loss scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from escalade.engine.training.optimizers import GradientForm, Gradients, ParameterGroup, step_groups
from escalade.engine.training.settings import StepSettings

_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000
"""Defaults of `torch.amp.GradScaler`."""
_NORM_EPSILON = 1e-6
"""Added to the norm by `torch.nn.utils.clip_grad_norm_`."""


class Accumulator:
    """The sum of the gradients of several calls in one tensor, which the plans of a step share."""

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None
        self.calls = 0
        """Calls whose gradients are in the sum."""

    def like(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return the sum; a new one if the gradients of all parameters have another size than before."""
        if self._total is None or self._total.shape != gradients.shape:
            self._total, self.calls = torch.zeros_like(gradients), 0
        return self._total


class Update:
    """Clips gradients, updates the parameters, and then the loss scale.

    All on the device, unless the optimizer has no rule: then its own step runs, on gradients that are the parameters'
    for its duration.
    """

    def __init__(
        self, settings: StepSettings, scale: torch.Tensor | None, device: torch.device, in_pytorch: bool
    ) -> None:
        self._settings, self._scale, self._in_pytorch = settings, scale, in_pytorch
        self.optimizer: torch.optim.Optimizer | None = None
        """The optimizer, if its own step updates the parameters."""
        self.form = GradientForm(
            divided=scale is not None or settings.clip_norm is not None or settings.accumulate > 1,
            checked=scale is not None,
            clip_value=settings.clip_value,
        )
        self.accumulator = Accumulator() if settings.accumulate > 1 else None
        self.growth = torch.zeros((), dtype=torch.int32, device=device)
        """Steps since the last change of the loss scale."""
        self.norm = None if settings.clip_norm is None else torch.zeros((), device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._ones = torch.ones((), device=device)

    def is_due(self) -> bool:
        """Return True if this call updates the parameters."""
        return self.accumulator is None or self.accumulator.calls + 1 >= self._settings.accumulate

    def count(self) -> None:
        """Count a call that succeeded."""
        if self.accumulator is not None:
            self.accumulator.calls = 0 if self.is_due() else self.accumulator.calls + 1

    def __call__(self, groups: Sequence[ParameterGroup], gradients: Gradients) -> None:
        """Update the parameters of all groups."""
        if self.optimizer is not None:
            self._step_of(self.optimizer, gradients)
            return
        if self.form.divided:
            divisor = self._divisor([gradients[one] for group in groups for one in group.parameters])
            for group in groups:
                group.divisor.copy_(divisor)
        step_groups(groups, gradients, in_pytorch=self._in_pytorch, scaled=self.form.checked)
        if self._scale is not None:
            self._update_scale(self._scale, groups[0].progress[2])

    def _update_scale(self, scale: torch.Tensor, skipped: torch.Tensor) -> None:
        self.skipped.add_(skipped.to(torch.int64))
        torch._amp_update_scale_(scale, self.growth, skipped, _GROWTH, _BACKOFF, _INTERVAL)

    def _step_of(self, optimizer: torch.optim.Optimizer, gradients: Gradients) -> None:
        """Run the optimizer's own step on copies of the gradients. It may keep them."""
        own = [gradient.to(one.dtype, copy=True) for one, gradient in gradients.items()]
        if self.form.divided:
            torch._foreach_div_(own, self._divisor(own))
        if self.form.clip_value is not None:
            torch._foreach_clamp_max_(own, self.form.clip_value)
            torch._foreach_clamp_min_(own, -self.form.clip_value)
        if self._scale is not None:
            largest = torch._foreach_norm(own, float("inf"))
            skipped = 1.0 - torch.stack(largest).isfinite().all().float()
            self._update_scale(self._scale, skipped)
            if skipped:  # as in GradScaler, the host waits for this
                return
        by_parameter = dict(zip(gradients, own, strict=True))
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        before = [one.grad for one in parameters]
        try:
            for one in parameters:
                one.grad = by_parameter.get(one)
            optimizer.step()
        finally:
            for one, gradient in zip(parameters, before, strict=True):
                one.grad = gradient

    def _divisor(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Return the divisor of the gradients: loss scale × calls × (norm / `clip_norm`, if above 1)."""
        divisor = (self._ones if self._scale is None else self._scale) * self._settings.accumulate
        if self.norm is None:
            return divisor
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
        self.norm.copy_(torch.linalg.vector_norm(torch.stack(norms)) / divisor)
        assert self._settings.clip_norm is not None
        factor = (self._settings.clip_norm / (self.norm + _NORM_EPSILON)).clamp(max=1.0)
        return divisor / factor
