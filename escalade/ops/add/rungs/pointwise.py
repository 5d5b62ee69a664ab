"""The rungs of add: those that all operations on single elements share."""

from __future__ import annotations

from typing import Any

from escalade.ops.base.rung import Rung
from escalade.ops.shared.pointwise import Naive, Vectorised

# Predictions are for 51,380,224 elements in fp16, 308 MB to move: 73 us at 4.24 TB/s. An element a thread has at
# most 4,096 loads of 2 bytes under way on an SM; at 0.7 us each, 132 SMs read 1.5 TB/s: 133 us.
RUNGS: tuple[Rung[Any], ...] = (
    Naive("naive", "an element a thread", None, None),
    Vectorised("vectorised", "16 bytes an access, several under way in a thread", "naive", 1.8),
)
