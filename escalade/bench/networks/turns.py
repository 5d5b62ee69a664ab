"""Samplers of whole networks, in turns."""

from __future__ import annotations

from collections.abc import Mapping

from escalade.device.timing import Sampler, Timing, interleave, keep_busy

_MIN_ROUNDS, _MAX_ROUNDS = 5, 1000


def on_device(samplers: Mapping[str, Sampler], seconds: float) -> dict[str, Timing]:
    """Events; two rounds go first, because the first replay of a graph also uploads it."""
    if not samplers:
        return {}
    interleave(samplers, seconds_each=0, min_rounds=2, max_rounds=2, before_round=keep_busy)
    return interleave(
        samplers,
        seconds_each=seconds,
        min_rounds=_MIN_ROUNDS,
        max_rounds=_MAX_ROUNDS,
        before_round=keep_busy,
    )


def by_clock(samplers: Mapping[str, Sampler], seconds: float) -> dict[str, Timing]:
    return interleave(samplers, seconds_each=seconds, min_rounds=_MIN_ROUNDS, max_rounds=_MAX_ROUNDS)
