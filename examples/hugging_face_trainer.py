"""Hugging Face's Trainer over a model that Escalade compiles.

    pip install 'transformers[torch]'
    python examples/hugging_face_trainer.py

`torch.compile(backend="escalade")` runs forward and backward as one plan each on a GPU; the Trainer keeps its loop,
optimizer and schedule. On the CPU PyTorch computes both.
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import escalade

EXAMPLES, STEPS = 32, 6


class Classifier(nn.Module):
    """A model as the Trainer expects it: it returns its loss if there are labels."""

    def __init__(self) -> None:
        super().__init__()
        network = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 4 * 4, 4)
        )
        self.network = torch.compile(network, backend="escalade")

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.network(pixel_values)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Images(Dataset[dict[str, torch.Tensor]]):
    """Random images whose class is their brightness."""

    def __init__(self) -> None:
        self.labels = torch.randint(0, 4, (EXAMPLES,))
        self.images = torch.randn(EXAMPLES, 3, 8, 8) / 2 + self.labels.view(-1, 1, 1, 1)

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=EXAMPLES, learning_rate=0.02,
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=Classifier(), args=settings, train_dataset=Images())
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert float(losses[-1]) < float(losses[0])
    print(f"{len(losses)} steps in Trainer with escalade {escalade.__version__}: {losses[0]} to {losses[-1]}")


if __name__ == "__main__":
    main()
