"""A single layer done by another system, and how far its result may be from the right one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from escalade.errors import EscaladeError
from escalade.measure.verification import compare

Inputs = Mapping[str, torch.Tensor]

AGREEMENT = {"fp32": 1e-4, "tf32": 2e-3, "fp16": 4e-3, "bf16": 3e-2, "fp8": 0.1}
"""How far a peer's result may be from the right one, as a whole: enough for Winograd's algorithm, and too little for
TF32 (3e-4) where fp32 was asked for."""


class WrongPeer(EscaladeError):
    """A peer whose result is wrong; the sentence says how."""


@dataclass(frozen=True)
class LayerPeer:
    """A system that does a problem in one layout; `run` gives its result."""

    system: str
    layout: str
    run: Callable[[Any, Inputs], torch.Tensor]
    note: Callable[[], str] = str
    """Says more about it once it has run."""


def error_of(peer: LayerPeer, problem: Any, inputs: Inputs, expected: torch.Tensor) -> float:
    """How far a peer's result is from the right one; `WrongPeer` if that is too far."""
    failure, error = compare(peer.run(problem, inputs), expected, AGREEMENT[problem.dtype])
    if failure:
        raise WrongPeer(failure)
    return error
