"""What a run is made of, and what of it may change when the run goes on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from escalade import parsing
from escalade.errors import UnsupportedError
from escalade_apps.train.augmentation import Augmentation

DTYPES = ("fp32", "tf32", "fp16", "bf16")
OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine")
EXTENDABLE = ("epochs", "steps", "patience", "every")
"""How long a run goes on and how often it is kept: all else makes another run of it."""


@dataclass(frozen=True)
class Settings:
    """All that the numbers of a run depend on, beside the images themselves."""

    task: str
    data: str
    epochs: int
    batch: int
    """Images a step, of all processes together."""
    lr: float
    optimizer: str
    schedule: str
    weight_decay: float
    dtype: str
    seed: int
    width: int
    """Channels of the network's first convolution."""
    side: int
    """Rows and columns of images that are resized or made up."""
    flip: bool
    shift: int
    held_out: float
    steps: int | None = None
    """The last step, where it is to end before its epochs do."""
    patience: int | None = None
    """Epochs without a better evaluation, after which it ends."""
    every: int | None = None
    """Steps from a checkpoint to the next, beside those at the end of each epoch."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "width", "side", "steps", "patience", "every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UnsupportedError(f"--{name} {value}: it must be at least 1")
        for name, known in (("dtype", DTYPES), ("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in known:
                raise UnsupportedError(
                    f"--{name} {getattr(self, name)}: training has {', '.join(known[:-1])} and {known[-1]}"
                )
        if not 0 < self.lr < math.inf:
            raise UnsupportedError(f"--lr {self.lr}: the learning rate must be above 0")
        if not 0 <= self.weight_decay < math.inf:
            raise UnsupportedError(f"--weight-decay {self.weight_decay}: it must not be below 0")
        if self.shift < 0:
            raise UnsupportedError(f"--shift {self.shift}: it must not be below 0")

    @property
    def augmentation(self) -> Augmentation:
        return Augmentation(self.flip, self.shift)

    def total(self, epoch_steps: int) -> int:
        """How many steps the run has."""
        return min(self.epochs * epoch_steps, self.steps or self.epochs * epoch_steps)

    def rate(self, step: int, total: int) -> float:
        """The learning rate of a step, counted from 0.

        `cosine` climbs to the learning rate over the first tenth of the steps and goes down to 0 at the last.
        """
        if self.schedule == "constant":
            return self.lr
        warm = max(1, total // 10)
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def resumed(self, given: Mapping[str, Any]) -> Settings:
        """These settings for a run that goes on, with those of the given ones that may change."""
        for name, value in given.items():
            if name not in EXTENDABLE and getattr(self, name) != value:
                option = name.replace("_", "-")
                raise UnsupportedError(
                    f"the run was begun with {option} {getattr(self, name)}, and {option} {value} would make another "
                    f"run of it; only {', '.join(EXTENDABLE[:-1])} and {EXTENDABLE[-1]} may change when one is resumed"
                )
        return dataclasses.replace(self, **{name: given[name] for name in EXTENDABLE if name in given})


def settings_of(values: Mapping[str, Any]) -> Settings:
    """The settings as a checkpoint keeps them."""
    return parsing.parse_dataclass(Settings, dict(values))
