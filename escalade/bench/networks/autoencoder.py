"""The convolutional autoencoder: small images through 256 channels and back, and above all its training."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from escalade import models
from escalade.bench.networks import ablation, parts, step_pairs, training_step
from escalade.bench.networks.resnets import images
from escalade.bench.networks.training_step import Training
from escalade.bench.networks.workload import Part, Workload
from escalade.bench.peers import registry

_SIZE, _SMALLEST = 32, 4
_TRAINING = Training(F.mse_loss, lambda x, seed: x, (64, 256, 1024), scale=2.0**16, rate=1e-2)


def _images(count: int, size: int, seed: int, device: torch.device) -> torch.Tensor:
    """Images [count, 3, size, size] in [0, 1]."""
    return torch.sigmoid(images(count, size, seed)).to(device)


AUTOENCODER = Workload(
    "autoencoder",
    lambda size, seed: models.ConvAutoencoder(),
    _images,
    _SIZE,
    batches=(64, 256, 1024),
    dtypes=("fp16", "tf32", "fp32"),
    peers=registry.plain("nchw", "nhwc"),
    parts={
        "accuracy": Part(parts.accuracy),
        "batches": Part(parts.batches),
        "training-step": training_step.part(_TRAINING),
        "training-ablation": ablation.part(_TRAINING),
        "training-pairs": step_pairs.part(_TRAINING),
    },
    smallest=_SMALLEST,
    small_batches=(4,),
    classifies=False,
)
