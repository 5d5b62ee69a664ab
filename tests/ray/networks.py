"""The smallest possible network, images for it, and time limits."""

from __future__ import annotations

import pathlib

import torch
from PIL import Image

from escalade.engine import compile
from escalade_apps.classify.images import Crop
from escalade_apps.classify.prediction import example

CLASSES = 3
SIDE = 8
PATIENCE = 1800
"""Seconds after which a machine is not slow but stuck."""


def save_network(path: pathlib.Path) -> pathlib.Path:
    """Write the file of an engine."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, stride=2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(36, CLASSES)
    )
    unit = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    images = example(2, Crop(SIDE, SIDE))
    compile(model.eval(), images, dtype="fp32", device="cpu", normalize=unit).save(path)
    return path


def picture(number: int) -> Image.Image:
    """An image of one color, unique among the first 65,536."""
    return Image.new("RGB", (SIDE, SIDE), (number % 256, number // 256 % 256, 128))
