"""GPU memory that is freed as soon as plans and engines are dropped."""

from __future__ import annotations

import gc

import pytest
import torch

import escalade
from escalade import models
from tests.engine.test_dropped import Mixed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["kernels", "mixed"])
def test_plans_that_have_to_go_take_their_memory_along(kind: str, cuda: torch.device) -> None:
    """At once, also those whose CUDA graph was recorded, with its own memory."""
    model, x = (Mixed().eval(), torch.randn(1, 3, 96, 96)) if kind == "mixed" else models.model("lenet")
    engine = escalade.compile(model, x, dtype="fp16", device=cuda, plans=1)
    given = {size: x.to(cuda).expand(size, *x.shape[1:]).contiguous() for size in (64, 48)}
    engine(given[64])
    gc.collect()
    gc.disable()
    try:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(cuda)
        for size in (48, 64, 48, 64):
            engine(given[size])
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated(cuda) == before
        del engine, model
        without = torch.cuda.memory_allocated(cuda)
        gc.collect()
        assert torch.cuda.memory_allocated(cuda) == without < before
    finally:
        gc.enable()
