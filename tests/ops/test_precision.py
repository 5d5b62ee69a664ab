"""PyTorch's precision switches: as requested inside, and restored afterwards, by either of its two APIs."""

from __future__ import annotations

import torch

from tests import fresh

STATES = (
    "pass",
    "torch.set_float32_matmul_precision('high')",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cuda.matmul.allow_tf32 = True; cudnn.allow_tf32 = False",
    "cudnn.enabled = False",
    "torch.backends.disable_global_flags()",
)
LATER_STATES = (
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "cudnn.conv.fp32_precision = 'ieee'",
    "torch.backends.fp32_precision = 'tf32'",
)
SCRIPT = """
import os, sys, torch
from escalade.ops.base.switches import precision, tf32_allowed

cudnn = torch.backends.cudnn
later = hasattr(cudnn, "conv")

def told(question):
    try:
        return question()
    except RuntimeError:
        return "refused"

def state():
    found = [cudnn.enabled, cudnn.benchmark, told(lambda: cudnn.allow_tf32)]
    found += [told(torch.get_float32_matmul_precision), told(lambda: torch.backends.cuda.matmul.allow_tf32)]
    if later:
        each = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn, torch.backends.mkldnn.matmul
        found += [one.fp32_precision for one in each]
    return found

def look_inside(dtype):
    allowed = dtype == "tf32"
    assert torch.backends.cuda.matmul.allow_tf32 == cudnn.allow_tf32 == allowed, state()
    assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")
    assert tf32_allowed() == allowed
    assert cudnn.enabled and cudnn.benchmark
    if later:
        assert (cudnn.conv.fp32_precision == "tf32") == allowed
        assert (torch.backends.cuda.matmul.fp32_precision == "tf32") == allowed

def look(made):
    exec(made)
    before = state()
    assert tf32_allowed() == ("'tf32'" in made or "'high'" in made or "'medium'" in made), made
    for dtype in ("fp32", "tf32", "fp16"):
        try:
            with precision(dtype):
                look_inside(dtype)
                raise KeyError
        except KeyError:
            pass
        pairs = zip(before, state(), strict=True)  # what was refused may be told
        assert all(one in ("refused", other) for one, other in pairs), (made, dtype, before, state())

for made in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        look(made)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, made
"""


def test_inside_as_asked_and_afterwards_as_before() -> None:
    """In other processes: the first API cannot undo settings of the second."""
    states = STATES + (LATER_STATES if hasattr(torch.backends.cudnn, "conv") else ())
    ran = fresh.python("-c", SCRIPT, *states)
    assert ran.returncode == 0, ran.stderr
