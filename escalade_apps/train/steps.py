"""One training step: forward, loss, backward, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from escalade.device.torch_private import FAST_PATHS
from escalade.engine import training_step
from escalade.ops.base.switches import precision

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_CAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


class TrainerStep(Protocol):
    """Trains the model on one batch."""

    def __call__(self, images: torch.Tensor, target: torch.Tensor, rate: float) -> torch.Tensor:
        """Update the parameters with learning rate `rate`. Return the loss before the update, on the device."""

    def state(self) -> dict[str, Any]:
        """Return the state of optimizer and loss scale, in a format that all implementations share."""

    def restore(self, state: dict[str, Any]) -> None: ...


def optimizer_of(name: str, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Return PyTorch's optimizer of that name. SGD gets a momentum of 0.9."""
    parameters = list(model.parameters())
    if name == "sgd":
        return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=weight_decay)
    kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    return kind(parameters, lr, weight_decay=weight_decay)


class PlannedStep:
    """Step that runs as one Escalade plan: one CUDA graph on a GPU, or two with a gradient all-reduce between them."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        example: tuple[torch.Tensor, torch.Tensor],
        dtype: str,
        twin: bool,
        reduce: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Plan the step. `reduce` averages the gradients of several processes in place."""
        self._optimizer = optimizer
        self._step = training_step(
            model, loss, optimizer, example, dtype=dtype, device="twin" if twin else None, reduce=reduce
        )

    def __call__(self, images: torch.Tensor, target: torch.Tensor, rate: float) -> torch.Tensor:
        _set_rate(self._optimizer, rate)
        return self._step(images, target)

    def state(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer.state_dict(), "scale": self._step.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self._step.load_state_dict(state["scale"])


class DistributedStep:
    """Step by PyTorch's autograd and DDP, for networks whose forward pass communicates (SyncBatchNorm).

    fp16 and bf16 use autocast with fp32 weights, fp16 also a loss scale.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        dtype: str,
        device: torch.device,
    ) -> None:
        self._model, self._loss, self._optimizer = model, loss, optimizer
        self._dtype, self._device = dtype, device
        self._scaler = torch.amp.GradScaler(device.type, enabled=dtype == "fp16")

    def __call__(self, images: torch.Tensor, target: torch.Tensor, rate: float) -> torch.Tensor:
        _set_rate(self._optimizer, rate)
        with arithmetic(self._dtype, self._device):
            loss = self._loss(self._model(images), target)
            self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def state(self) -> dict[str, Any]:
        saved = self._scaler.state_dict()
        scale = {"scale": saved["scale"], "good_steps": float(saved["_growth_tracker"])} if saved else {}
        return {"optimizer": self._optimizer.state_dict(), "scale": scale}

    def restore(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        if current := self._scaler.state_dict():
            scale = state["scale"]
            current |= {"scale": scale["scale"], "_growth_tracker": int(scale["good_steps"])}
            self._scaler.load_state_dict(current)


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


@contextmanager
def arithmetic(dtype: str, device: torch.device) -> Iterator[None]:
    """Run PyTorch in this dtype with deterministic cuDNN algorithms."""
    cudnn: Any = torch.backends.cudnn
    with precision(dtype), torch.autocast(device.type, _CAST.get(dtype), enabled=dtype in _CAST):
        before = cudnn.deterministic
        with FAST_PATHS.allow_flag_changes():
            cudnn.deterministic, cudnn.benchmark = True, False  # `precision` restores `benchmark`
        try:
            yield
        finally:
            with FAST_PATHS.allow_flag_changes():
                cudnn.deterministic = before
