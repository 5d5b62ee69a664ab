"""How an engine was asked for: what it computes in, where, and how much it keeps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from escalade import parsing
from escalade.engine.graph.forms import require_dtype
from escalade.engine.graph.graph import Graph
from escalade.engine.passes.fusion_level import FusionLevel
from escalade.engine.plan.constants import check_finite_weights
from escalade.errors import UnsupportedError

MOST_PLANS = 8
"""Sizes (and input types) that an engine keeps ready; the one not used for longest goes first."""
TWIN = "twin"


@dataclass(frozen=True)
class Settings:
    """What was asked for, checked."""

    dtype: str
    device: torch.device
    on_twin: bool
    fusion: FusionLevel
    measured: bool
    """Whether a plan's steps are timed beside PyTorch when it is made, and the faster kept for each."""
    plans: int
    """How many are kept."""
    buffers: int
    """Sets of them that calls of one plan overlap in."""
    memory: int | None
    """Bytes that values and packed weights of all plans may take."""
    pieces: int | None
    """The batch size that every call is computed in, if it is deterministic."""

    @staticmethod
    def of(
        dtype: str,
        device: torch.device | str,
        plans: int,
        fusion: FusionLevel,
        measured: bool,
        buffers: int,
        memory: str | int | None,
        pieces: int | None,
    ) -> Settings:
        dtype = require_dtype(dtype)
        require_device(device)
        if pieces is not None and (measured or (device != TWIN and torch.device(device).type == "cpu")):
            raise UnsupportedError(
                "deterministic=True, or pieces, is for Escalade's kernels, on cuda or on the twin and without "
                "measured=True: "
                "PyTorch's operators, which compute on the CPU, may add up in another order for another batch"
            )
        if pieces is not None and (type(pieces) is not int or pieces < 1):
            raise UnsupportedError(
                f"pieces={pieces!r}: it is the items of a batch, a whole number of at least 1"
            )
        if measured:
            require_gpu("measured=True", device)
        if dtype == "fp8" and fusion is not FusionLevel.fused:
            raise UnsupportedError(f"fp8 is for fused plans; {fusion} runs in fp32, tf32, fp16 and bf16")
        for name, number in {"plans": plans, "buffers": buffers}.items():
            if not isinstance(number, int) or number < 1:
                raise UnsupportedError(f"{name}={number!r}: a whole number of them is kept, at least one")
        home = torch.device("cpu" if device == TWIN else device)
        return Settings(
            dtype, home, device == TWIN, fusion, measured, plans, buffers, _in_bytes(memory), pieces
        )

    @property
    def where(self) -> str:
        """What runs the plans: `cuda`, `twin`, or `cpu`, PyTorch's operators."""
        return TWIN if self.on_twin else self.device.type

    def on(self, device: torch.device) -> Settings:
        """These on another device."""
        return replace(self, device=device, on_twin=False)

    def require_for(self, graph: Graph) -> None:
        """Refuses a network that cannot be computed so."""
        check_finite_weights(graph)
        if self.dtype == "fp8" and not graph.ranges:
            raise UnsupportedError(
                "dtype fp8 needs the ranges of the network's values: compile with calibration=batches, a few batches "
                "that look like the data to come"
            )

    @property
    def options(self) -> dict[str, Any]:
        """What an engine like this one is made with, beside its network and dtype."""
        return {
            "device": TWIN if self.on_twin else self.device, "plans": self.plans, "fusion": self.fusion,
            "measured": self.measured, "buffers": self.buffers, "memory": self.memory, "pieces": self.pieces,
        }  # fmt: skip


def require_device(device: torch.device | str) -> None:
    if device == TWIN:
        return
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):  # no device that PyTorch knows
        kind = ""
    if kind not in ("cpu", "cuda"):
        given = repr(device) if isinstance(device, str) else device
        raise UnsupportedError(f"device {given}: an engine runs on cuda, on cpu, or on the twin")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("device cuda: there is no GPU here; device='cpu' and device='twin' need none")
    if kind == "cuda" and (torch.device(device).index or 0) >= (there := torch.cuda.device_count()):
        raise UnsupportedError(f"device {device}: the last GPU here is cuda:{there - 1}")


def require_gpu(what: str, device: torch.device | str) -> None:
    """For what times kernels beside PyTorch's operators."""
    if device == TWIN or torch.device(device).type != "cuda":
        where = "the twin" if device == TWIN else f"device {device}"
        raise UnsupportedError(
            f"{what} times kernels beside PyTorch's operators on a GPU; this engine runs on {where}"
        )


def _in_bytes(memory: str | int | None) -> int | None:
    try:
        found = parsing.parse_size(memory) if isinstance(memory, str) else memory
    except ValueError as error:
        raise UnsupportedError(f"memory={memory!r}: {error}") from error
    if found is not None and (isinstance(found, bool) or not isinstance(found, int) or found < 1):
        raise UnsupportedError(f"memory={memory!r}: it is a number of bytes, or a text such as '2GiB'")
    return found
