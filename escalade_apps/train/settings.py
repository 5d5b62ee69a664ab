"""Settings of a run, and which of them may change when it is resumed."""

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
"""Settings that may change when a run is resumed: its length and how often it is checkpointed."""


@dataclass(frozen=True)
class Settings:
    """Everything that the results of a run depend on, apart from the images."""

    task: str
    data: str
    epochs: int
    batch: int
    """Images per step over all processes."""
    lr: float
    optimizer: str
    schedule: str
    weight_decay: float
    dtype: str
    seed: int
    width: int
    """Channels of the first convolution."""
    side: int
    """Rows and columns of resized or synthetic images."""
    flip: bool
    shift: int
    held_out: float
    steps: int | None = None
    """Upper limit on the steps of the whole run."""
    patience: int | None = None
    """Stop after this many epochs without a better evaluation."""
    every: int | None = None
    """Steps between checkpoints, in addition to one per epoch."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "width", "side", "steps", "patience", "every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UnsupportedError(f"--{name} {value}: must be at least 1")
        for name, known in (("dtype", DTYPES), ("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in known:
                raise UnsupportedError(
                    f"--{name} {getattr(self, name)}: training supports {', '.join(known[:-1])} and {known[-1]}"
                )
        if not 0 < self.lr < math.inf:
            raise UnsupportedError(f"--lr {self.lr}: must be positive and finite")
        if not 0 <= self.weight_decay < math.inf:
            raise UnsupportedError(f"--weight-decay {self.weight_decay}: must be finite and not negative")
        if self.shift < 0:
            raise UnsupportedError(f"--shift {self.shift}: must not be negative")

    @property
    def augmentation(self) -> Augmentation:
        return Augmentation(self.flip, self.shift)

    def total(self, epoch_steps: int) -> int:
        """Return the number of steps of the run."""
        return min(self.epochs * epoch_steps, self.steps or self.epochs * epoch_steps)

    def rate(self, step: int, total: int) -> float:
        """Return the learning rate of a step, counted from 0.

        `cosine` warms up linearly over the first tenth of the steps, then decays to 0.
        """
        if self.schedule == "constant":
            return self.lr
        warmup = max(1, total // 10)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def resumed(self, given: Mapping[str, Any]) -> Settings:
        """Return the settings of a resumed run. Raises UnsupportedError if one differs that must not change."""
        for name, value in given.items():
            if name not in EXTENDABLE and getattr(self, name) != value:
                option = name.replace("_", "-")
                raise UnsupportedError(
                    f"--{option} {value}: the run was started with {option} {getattr(self, name)}; only "
                    f"{', '.join(EXTENDABLE[:-1])} and {EXTENDABLE[-1]} may change when a run is resumed"
                )
        return dataclasses.replace(self, **{name: given[name] for name in EXTENDABLE if name in given})


def settings_of(values: Mapping[str, Any]) -> Settings:
    """Parse settings from a checkpoint. Raises ValueError if they are invalid."""
    return parsing.parse_dataclass(Settings, dict(values))
