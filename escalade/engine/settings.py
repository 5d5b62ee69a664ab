"""Options of an engine: dtype, device, and limits on what it caches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from escalade import parsing
from escalade.engine.graph.forms import require_dtype
from escalade.engine.graph.graph import Graph
from escalade.engine.nodes.convert import FakeQuantize
from escalade.engine.passes import FusionLevel
from escalade.engine.plan.constants import check_finite_weights
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import QUANTIZED

DEFAULT_PLANS = 8
"""Default number of cached plans, one per combination of input sizes and formats."""
TWIN = "twin"


@dataclass(frozen=True)
class Settings:
    """Validated options."""

    dtype: str
    device: torch.device
    on_twin: bool
    fusion: FusionLevel
    measured: bool
    """Time each step of a new plan against PyTorch and use the faster."""
    plans: int
    """Maximum number of cached plans."""
    buffers: int
    """Sets of buffers per plan: the number of calls that can overlap."""
    memory: int | None
    """Limit in bytes for values and packed weights of all plans."""
    fixed_batch: int | None
    """Batch size that a deterministic engine computes every call in; None if not deterministic."""

    @staticmethod
    def of(
        dtype: str,
        device: torch.device | str,
        plans: int,
        fusion: FusionLevel,
        measured: bool,
        buffers: int,
        memory: str | int | None,
        fixed_batch: int | None,
    ) -> Settings:
        dtype = require_dtype(dtype)
        require_device(device)
        if fixed_batch is not None and (measured or (device != TWIN and torch.device(device).type == "cpu")):
            raise UnsupportedError(
                "deterministic=True and fixed_batch need Escalade's kernels: use device 'cuda' or 'twin' and leave out "
                "measured=True. PyTorch's operators may sum in another order for another batch size"
            )
        if fixed_batch is not None and (type(fixed_batch) is not int or fixed_batch < 1):
            raise UnsupportedError(
                f"fixed_batch={fixed_batch!r}: pass a batch size, a whole number of at least 1"
            )
        if measured:
            require_gpu("measured=True", device)
        if dtype in QUANTIZED and fusion is not FusionLevel.fused:
            raise UnsupportedError(
                f"{dtype} needs fused plans; fusion level {fusion} supports fp32, tf32, fp16 and bf16"
            )
        for name, number in {"plans": plans, "buffers": buffers}.items():
            if not isinstance(number, int) or number < 1:
                raise UnsupportedError(f"{name}={number!r}: pass a whole number of at least 1")
        home = torch.device("cpu" if device == TWIN else device)
        return Settings(
            dtype, home, device == TWIN, fusion, measured, plans, buffers, _parse_bytes(memory), fixed_batch
        )

    @property
    def where(self) -> str:
        """The backend that runs the plans: `cuda`, `twin`, or `cpu` (PyTorch's operators)."""
        return TWIN if self.on_twin else self.device.type

    def on(self, device: torch.device) -> Settings:
        return replace(self, device=device, on_twin=False)

    def check(self, graph: Graph) -> None:
        """Refuse a network that does not work with these options."""
        check_finite_weights(graph)
        if self.dtype in QUANTIZED and not graph.ranges and not any(map(FakeQuantize.matches, graph)):
            raise UnsupportedError(
                f"dtype {self.dtype} needs the ranges of the network's values: compile with calibration=batches, a few "
                "batches of representative inputs"
            )

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that recreate an engine with these options, except its dtype."""
        return {
            "device": TWIN if self.on_twin else self.device, "plans": self.plans, "fusion": self.fusion,
            "measured": self.measured, "buffers": self.buffers, "memory": self.memory, "fixed_batch": self.fixed_batch,
        }  # fmt: skip


def require_device(device: torch.device | str) -> None:
    if device == TWIN:
        return
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):  # not a device of PyTorch's
        kind = ""
    if kind not in ("cpu", "cuda"):
        name = repr(device) if isinstance(device, str) else device
        raise UnsupportedError(f"device {name}: engines run on cuda, cpu or twin")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("device cuda: no GPU is available; device='cpu' and device='twin' need none")
    if kind == "cuda" and (torch.device(device).index or 0) >= (count := torch.cuda.device_count()):
        raise UnsupportedError(f"device {device}: the last GPU of this machine is cuda:{count - 1}")


def require_gpu(what: str, device: torch.device | str) -> None:
    """Refuse `what`, which times kernels against PyTorch's operators, on any device but a GPU."""
    if device == TWIN or torch.device(device).type != "cuda":
        where = "the twin" if device == TWIN else f"device {device}"
        raise UnsupportedError(
            f"{what} times kernels against PyTorch's operators and needs a GPU; this engine runs on {where}"
        )


def _parse_bytes(memory: str | int | None) -> int | None:
    try:
        found = parsing.parse_size(memory) if isinstance(memory, str) else memory
    except ValueError as error:
        raise UnsupportedError(f"memory={memory!r}: {error}") from error
    if found is not None and (isinstance(found, bool) or not isinstance(found, int) or found < 1):
        raise UnsupportedError(f"memory={memory!r}: pass a number of bytes, or a string such as '2GiB'")
    return found
