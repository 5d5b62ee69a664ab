"""Engine files taken apart and rebuilt with a valid checksum: files that someone who knows the format can write."""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

from escalade.engine.file import _digest


@dataclass
class Contents:
    """Return a file's metadata, its graph as plain data, and its tensors."""

    metadata: dict[str, str]
    graph: Any
    tensors: dict[str, torch.Tensor]

    @staticmethod
    def of(path: pathlib.Path) -> Contents:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata())
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        return Contents(metadata, json.loads(metadata["graph"]), tensors)

    def written(self) -> bytes:
        graph = json.dumps(self.graph)
        sha256 = _digest(graph, self.metadata["dtype"], self.tensors)
        return safetensors.torch.save(self.tensors, {**self.metadata, "graph": graph, "sha256": sha256})


def replaced(path: pathlib.Path, content: bytes) -> None:
    """Write a file anew: truncating it first would wait for the disk."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


class EveryKind(nn.Module):
    """Every kind of node that a file can hold, and arguments of every kind for PyTorch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        self.second = nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False)
        self.fc, self.rows, self.groups = nn.Linear(4, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4)
        self.wider = nn.ConvTranspose2d(4, 4, 2, 2)
        self.order = nn.Buffer(torch.tensor([2, 0, 3]))
        self.token = nn.Parameter(torch.randn(1, 4))

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> dict[str, Any]:
        y = self.pool(F.relu6(self.norm(self.first(x))))
        y = F.relu(self.second(y) + y)
        up = self.wider(F.interpolate(F.channel_shuffle(self.groups(y), 2), scale_factor=2.0))
        up = F.pixel_unshuffle(F.avg_pool2d(F.pad(up, (1, 0, 0, 1), "reflect"), 2), 2)
        z = F.gelu(self.rows(self.fc(F.adaptive_avg_pool2d(y, 1).flatten(1))))
        z = z.masked_fill(mask > 0, float("-inf")).softmax(-1)
        z = torch.cat([z, self.token.expand(x.shape[0], -1), torch.zeros(x.shape[0], 1)], 1)
        first, second = z.split([4, 5], 1)
        tokens = up.flatten(1)[:, :64].view(-1, 2, 2, 16)
        heads = F.scaled_dot_product_attention(tokens.sin(), tokens, tokens.cos())
        both = torch.cat([y, torch.fake_quantize_per_tensor_affine(self.second(y), 0.1, 0, -8, 7)], 1)[:, 1:5]
        return {
            "z": [z, first.log_softmax(1) * torch.arange(4.0)],
            "up": (up[:, self.order],),
            "heads": heads,
            "which": second.max(1)[1],
            "half": both.permute(0, 2, 3, 1).sum(3).half(),
        }


def every_kind(path: pathlib.Path) -> Contents:
    """An engine of `EveryKind` in a file."""
    from escalade.engine import compile

    torch.manual_seed(3)
    inputs = (torch.randint(0, 256, (2, 3, 9, 9), dtype=torch.uint8),)
    engine = compile(
        EveryKind().eval(), inputs, {"mask": torch.randn(2, 4)}, normalize=((0.5,) * 3, (0.2,) * 3)
    )
    engine.save(path)
    return Contents.of(path)
