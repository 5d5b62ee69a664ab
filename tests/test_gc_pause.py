"""Garbage collection is paused while plans are made, and restored afterwards."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from escalade.engine import compile, plan_cache
from escalade.errors import UnsupportedError
from escalade.gc_pause import gc_paused


@pytest.fixture(params=[True, False], ids=["on", "off"])
def is_on(request: pytest.FixtureRequest) -> Iterator[bool]:
    """True if the caller has garbage collection enabled."""
    if not request.param:
        gc.disable()
    yield request.param
    gc.enable()


def test_it_is_as_it_was(is_on: bool) -> None:
    with gc_paused():
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is is_on
    with pytest.raises(UnsupportedError), gc_paused():
        raise UnsupportedError("this cannot be had")
    assert gc.isenabled() is is_on


def test_the_last_to_leave_turns_it_on() -> None:
    """One thread may record a graph, during which freeing an older one is an error, while another makes a plan."""
    first, second = gc_paused(), gc_paused()
    with first:
        second.__enter__()
    assert not gc.isenabled(), "the other one is not done"
    second.__exit__(None, None, None)
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_process_that_was_forked_has_it_on() -> None:
    code = """
import gc, os
from escalade.gc_pause import gc_paused
with gc_paused():
    child = os.fork()
    if not child:
        with gc_paused():
            assert not gc.isenabled()
        os._exit(0 if gc.isenabled() else 1)
    assert not gc.isenabled() and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert gc.isenabled()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plans_are_made_without_it(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    make = plan_cache.make_plan

    def made(*arguments: Any, **keywords: Any) -> Any:
        seen.append(gc.isenabled())
        return make(*arguments, **keywords)

    monkeypatch.setattr(plan_cache, "make_plan", made)
    engine = compile(torch.nn.ReLU(), torch.ones(1, 4), device="cpu")
    engine(torch.ones(2, 4))
    assert seen and not any(seen)
    assert gc.isenabled() is is_on
