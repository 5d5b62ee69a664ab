"""Networks that commands find by the names of their constructors."""

from __future__ import annotations

from torch import nn


class Tiny(nn.Sequential):
    """A linear layer with its activation."""

    example_shape = (64,)

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 24), nn.ReLU())


class Colours(nn.Sequential):
    """A classifier of small images."""

    example_shape = (3, 16, 16)

    def __init__(self) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
