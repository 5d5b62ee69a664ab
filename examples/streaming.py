"""Batches from host memory through an engine, with the copies overlapped.

    python examples/streaming.py

`engine.stream` pulls batches from any iterable. On a GPU, while one batch is computed, the next is copied in and the
results of the previous one are copied out, each on its own CUDA stream. Memory does not grow with the number of
batches, and results come in order. Without a GPU the kernels run on the twin, one batch after another.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

import escalade

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    ).eval()


def photographs(batches: int) -> Iterator[torch.Tensor]:
    """Yield uint8 images like a decoder's; replace this by a data loader. The last batch is smaller."""
    generator = torch.Generator().manual_seed(0)
    for number in range(batches):
        size = 4 if number < batches - 1 else 1
        yield torch.randint(0, 256, (size, 3, 16, 16), dtype=torch.uint8, generator=generator)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "twin"
    model, example = network(), next(photographs(1))

    # The engine takes bytes: (x / 255 - mean) / std is computed by the first kernel.
    engine = escalade.compile(model, example, dtype="fp16", device=device, normalize=(MEAN, STD))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    for images, logits in zip(photographs(5), engine.stream(photographs(5)), strict=True):
        torch.testing.assert_close(logits.float(), model((images / 255 - mean) / std), atol=2e-2, rtol=2e-2)
        print(f"{len(images)} images: classes {logits.argmax(1).tolist()}")


if __name__ == "__main__":
    main()
