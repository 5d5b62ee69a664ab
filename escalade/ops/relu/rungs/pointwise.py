"""The rungs of relu: those that all operations on single elements share."""

from __future__ import annotations

from typing import Any

from escalade.ops.base.rung import Rung
from escalade.ops.shared.pointwise import Naive, Vectorised

# Predictions are for 51,380,224 elements in fp16, 206 MB to move: 49 us at 4.24 TB/s. An element a thread has at
# most 2,048 loads of 2 bytes under way on an SM; at 0.7 us each, 132 SMs read 0.77 TB/s: 133 us. In fp32, with
# twice the bytes under way, the gain should be 1.3. The gradient reads two tensors, so that even a thread with one
# element has two loads under way: 1.8 in fp16 and 1.1 in fp32.
RUNGS: tuple[Rung[Any], ...] = (
    Naive("naive", "an element a thread", None, None),
    Vectorised("vectorised", "16 bytes an access, several under way in a thread", "naive", 2.6),
)
