"""A Lightning module whose training step is one plan of Escalade.

    pip install lightning
    python examples/lightning_module.py

Manual optimization leaves forward, loss, backward and optimizer to `escalade.training_step`. Lightning keeps the loop,
checkpoints, logging and learning-rate schedules.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import escalade

EPOCHS, BATCH = 3, 16


class Classifier(lightning.LightningModule):
    """A small convolutional network, trained with SGD."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.network = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(8 * 4 * 4, 4),
        )  # fmt: skip
        self.losses: list[float] = []
        self._step: Any = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.network.parameters(), lr=0.1, momentum=0.9)

    def training_step(self, batch: list[torch.Tensor], _: int) -> None:
        if self._step is None:  # here, where Lightning has moved the model to its device
            optimizer = self.optimizers(use_pl_optimizer=False)
            assert isinstance(optimizer, torch.optim.Optimizer)
            self._step = escalade.training_step(self.network, nn.functional.cross_entropy, optimizer, batch)
        loss = self._step(*batch)
        self.log("loss", loss, prog_bar=True)
        self.losses.append(float(loss))


def main() -> None:
    torch.manual_seed(0)
    classes = torch.randint(0, 4, (64,))
    images = torch.randn(64, 3, 8, 8) / 2 + classes.view(-1, 1, 1, 1)  # the class is the brightness
    module = Classifier()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, accelerator="auto", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(images, classes), BATCH))
    first, last = module.losses[0], module.losses[-1]
    assert last < first
    print(f"{len(module.losses)} steps in Lightning: loss {first:.3f} to {last:.3f}")


if __name__ == "__main__":
    main()
