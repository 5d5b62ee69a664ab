"""Calls of operators from Python, each beside PyTorch's for the same layer, too small to fill a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from escalade import ops
from escalade.errors import UnsupportedError

BATCH, SIDE, WIDTH, CLASSES = 2, 8, 64, 10
"""Images, their rows and columns, channels or features, and classes."""
_SPREAD = 0.3
STORAGE = {"fp16": torch.float16, "fp32": torch.float32}
_MLP = f"{WIDTH}-{WIDTH}bg_{WIDTH}-32b"
Function = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class New:
    """Makes the tensors of a call."""

    dtype: str
    layout: str
    device: torch.device
    generator: torch.Generator

    def __call__(self, *size: int, learns: bool = True, dtype: str = "") -> torch.Tensor:
        """Return random numbers, in the call's dtype unless another is named; images in the call's layout."""
        made = torch.randn(size, generator=self.generator, device=self.device) * _SPREAD
        made = made.to(STORAGE[dtype or self.dtype])
        if len(size) == 4 and self.layout == "nhwc":
            made = made.contiguous(memory_format=torch.channels_last)
        return made.requires_grad_(learns)

    def image(self, channels: int = WIDTH, learns: bool = True) -> torch.Tensor:
        return self(BATCH, channels, SIDE, SIDE, learns=learns)

    def convolution(self, channels: int, filters: int, dtype: str = "") -> tuple[torch.Tensor, ...]:
        """Return filters and their bias."""
        return self(filters, channels, 3, 3, dtype=dtype), self(filters, dtype=dtype)


@dataclass(frozen=True)
class Call:
    """One way to call an operator: its tensors, and both functions of them."""

    name: str
    tensors: Callable[[New], tuple[torch.Tensor, ...]]
    ours: Function
    theirs: Function
    layouts: Mapping[str, tuple[str, ...]]
    """Layouts by dtype."""
    autocast: bool = False
    """True to call it under autocast to the dtype."""


def _normed(new: New) -> tuple[torch.Tensor, ...]:
    """Return an image, BatchNorm's weight and bias, and its statistics."""
    device = new.device
    learnt = new(WIDTH, dtype="fp32"), new(WIDTH, dtype="fp32")
    return new.image(), *learnt, torch.zeros(WIDTH, device=device), torch.ones(WIDTH, device=device)


def _classified(new: New) -> tuple[torch.Tensor, ...]:
    return new(BATCH, CLASSES), torch.arange(1, BATCH + 1, device=new.device)


def _chained(new: New) -> tuple[torch.Tensor, ...]:
    return new(BATCH, WIDTH), new(WIDTH, WIDTH), new(WIDTH), new(32, WIDTH), new(32)


def _their_chain(x: torch.Tensor, *learnt: torch.Tensor) -> torch.Tensor:
    return F.linear(F.gelu(F.linear(x, *learnt[:2])), *learnt[2:])


def _their_loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss with sums in fp32 at least, as ours has."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.mse_loss(x.to(wide), target.to(wide))


def _convolution(new: New) -> tuple[torch.Tensor, ...]:
    return new.image(), *new.convolution(WIDTH, WIDTH)


_HALF = {"fp16": ("nhwc",)}
_BOTH = {"fp16": ("nhwc", "nchw")}
_EVERY = {"fp16": ("nhwc",), "fp32": ("nchw", "nhwc")}
_FLAT = {"fp16": ("flat",), "fp32": ("flat",)}
_convolve, _theirs = partial(ops.conv2d, padding=1), partial(F.conv2d, padding=1)
# fmt: off
_ALL = (
    Call("conv2d", _convolution, _convolve, _theirs, _EVERY),
    Call("conv2d_relu", _convolution, partial(_convolve, relu=True), lambda *given: F.relu(_theirs(*given)), _HALF),
    Call("conv2d_autocast", lambda new: (new.image(), *new.convolution(WIDTH, WIDTH, "fp32")), _convolve, _theirs,
         _HALF, autocast=True),
    Call("conv2d_of_an_image", lambda new: (new.image(3, learns=False), *new.convolution(3, 256)), _convolve, _theirs,
         _HALF),
    Call("max_pool2d", lambda new: (new.image(),), lambda x: ops.max_pool2d(x, 2), lambda x: F.max_pool2d(x, 2), _BOTH),
    Call("avg_pool2d", lambda new: (new.image(),), lambda x: ops.avg_pool2d(x, 2), lambda x: F.avg_pool2d(x, 2), _HALF),
    Call("upsample2d", lambda new: (new.image(),), lambda x: ops.upsample2d(x, 2 * SIDE),
         lambda x: F.interpolate(x, size=(2 * SIDE, 2 * SIDE)), _HALF),
    Call("relu", lambda new: (new.image(),), ops.relu, F.relu, _HALF),
    Call("add_relu", lambda new: (new.image(), new.image()), partial(ops.add, relu=True), lambda x, y: F.relu(x + y),
         _HALF),
    Call("linear", lambda new: (new(BATCH, WIDTH), new(WIDTH, WIDTH), new(WIDTH)), ops.linear, F.linear, _FLAT),
    Call("batch_norm_training", _normed, lambda x, w, b, m, v: ops.batch_norm(x, w, b, m, v, True),
         lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, True), _HALF),
    Call("batch_norm", _normed, lambda x, w, b, m, v: ops.batch_norm(x, w, b, m, v, False),
         lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, False), _HALF),
    Call("mse_loss", lambda new: (new.image(), new.image(learns=False)), ops.mse_loss, _their_loss, _EVERY),
    Call("cross_entropy", _classified, ops.cross_entropy, F.cross_entropy, {"fp32": ("flat",)}),
    Call("mlp", _chained, lambda x, *learnt: ops.mlp(x, learnt, _MLP), _their_chain, {"fp16": ("flat",)}),
)
# fmt: on
CALLS = {call.name: call for call in _ALL}
"""Every call by its name."""


def chosen(names: tuple[str, ...]) -> dict[str, Call]:
    """Return the calls of these names; all without any."""
    for name in names:
        if name not in CALLS:
            raise UnsupportedError(f"there is no call {name!r}; there is {', '.join(CALLS)}")
    return {name: CALLS[name] for name in names} if names else dict(CALLS)
