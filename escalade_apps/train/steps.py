"""One step of training: forward, loss, backward, optimiser."""

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


class Step(Protocol):
    """What takes a batch and makes the model better by it."""

    def __call__(self, images: torch.Tensor, target: torch.Tensor, rate: float) -> torch.Tensor:
        """Changes the model's parameters at this learning rate; the loss before it, on the device."""

    def state(self) -> dict[str, Any]:
        """All that the next steps depend on beside the model: moments, loss scale, counts. All steps have it alike."""

    def restore(self, state: dict[str, Any]) -> None: ...


def optimizer_of(name: str, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """PyTorch's optimiser of that name: momentum of 0.9 for SGD."""
    parameters = list(model.parameters())
    if name == "sgd":
        return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=weight_decay)
    kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    return kind(parameters, lr, weight_decay=weight_decay)


class PlannedStep:
    """A step as one plan: forward, loss, backward and optimiser by Escalade's kernels, one CUDA graph on a GPU, or two
    where processes meet between them."""

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
        """Several processes `reduce` their gradients to those of all."""
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


class SharedStep:
    """A step of one of several processes whose layers see the images of all (BatchNorm): by PyTorch's autograd, in the
    midst of which they meet, and DDP averages gradients.

    fp16 and bf16 are mixed with fp32 weights, fp16 with a loss scale.
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
        kept = self._scaler.state_dict()
        scale = {"scale": kept["scale"], "good_steps": float(kept["_growth_tracker"])} if kept else {}
        return {"optimizer": self._optimizer.state_dict(), "scale": scale}

    def restore(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        if kept := self._scaler.state_dict():
            scale = state["scale"]
            kept |= {"scale": scale["scale"], "_growth_tracker": int(scale["good_steps"])}
            self._scaler.load_state_dict(kept)


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


@contextmanager
def arithmetic(dtype: str, device: torch.device) -> Iterator[None]:
    """PyTorch computes in this dtype, and the same numbers every time."""
    cudnn: Any = torch.backends.cudnn
    with precision(dtype), torch.autocast(device.type, _CAST.get(dtype), enabled=dtype in _CAST):
        before = cudnn.deterministic
        with FAST_PATHS.allow_flag_changes():
            cudnn.deterministic, cudnn.benchmark = True, False  # `precision` puts the second back
        try:
            yield
        finally:
            with FAST_PATHS.allow_flag_changes():
                cudnn.deterministic = before
