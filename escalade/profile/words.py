"""What counters say, in words: what a kernel is busy with or waits for, and what it does more than it must."""

from __future__ import annotations

from collections.abc import Sequence

from escalade.device.twin import Counts
from escalade.profile.counters import Counters
from escalade.profile.parts import Part

BUSY_PCT = 60.0
"""Percent of its peak from which on a unit is what bounds a kernel."""
TOO_MUCH = 1.2
"""Times the fewest bytes from which on traffic is worth a word."""
WIDEST_REQUEST = 16.0
"""Sectors that a warp touches whose threads load 16 bytes each, one behind the other: more are scattered."""
CONFLICTS_PCT = 10.0
FEW_WARPS_PCT = 25.0
_CONFLICTING = "{:.0f}% of the turns of shared memory are bank conflicts"
_WAITS = {
    "long_scoreboard": "memory",
    "short_scoreboard": "shared memory or special functions",
    "barrier": "other warps at a barrier",
    "membar": "fences",
    "mio_throttle": "the queue of shared memory",
    "lg_throttle": "the queue of global memory",
    "tex_throttle": "the queue of textures",
    "math_pipe_throttle": "busy arithmetic units",
    "gmma": "tensor cores",
    "wait": "the latency of its own instructions",
    "no_instruction": "instructions to be fetched",
    "imc_miss": "constants to be fetched",
    "branch_resolving": "branches",
    "drain": "its last stores",
    "dispatch_stall": "the dispatcher",
    "sleeping": "its own sleep",
}
"""What a warp waits for, by the name of the reason."""


def said(part: Part, kernels: Sequence[Counters], floor_us: float | None) -> str:
    """One line on a part by the counters of its kernels; that of the longest says what it waits for."""
    timed = [one for one in kernels if one.us is not None]
    if not timed:
        return ""
    longest = max(timed, key=lambda one: one.us or 0.0)
    sentences = [_occupied(longest), _traffic(part, kernels), _against_floor(timed, floor_us)]
    sentences += [_scattered(longest), _conflicts(longest), _few_warps(longest)]
    return "; ".join(filter(None, sentences))


def _occupied(one: Counters) -> str:
    units = {
        "is busy with memory: it moves {:.0f}% of what it could": one.dram_pct,
        "is busy on tensor cores: they work in {:.0f}% of all cycles": one.tensor_pct,
        "is busy issuing: instructions in {:.0f}% of all cycles": one.issue_pct,
    }
    known = {text: share for text, share in units.items() if share is not None}
    text = max(known, key=lambda each: known[each], default=None)
    if text is not None and known[text] >= BUSY_PCT:
        return text.format(known[text])
    if not one.stalls:
        return ""
    reason, share = next(iter(one.stalls.items()))
    waits_on = _WAITS.get(reason, reason.replace("_", " "))
    return f"waits on {waits_on}: {100 * share:.0f}% of stalls are {reason.replace('_', ' ')}"


def _traffic(part: Part, kernels: Sequence[Counters]) -> str:
    moved = [one.dram_bytes for one in kernels]
    if not part.bytes or None in moved:
        return ""
    times = sum(one for one in moved if one is not None) / part.bytes
    return f"moves {times:.1f}x the bytes that it must" if times >= TOO_MUCH else ""


def _against_floor(kernels: Sequence[Counters], floor_us: float | None) -> str:
    if not floor_us:
        return ""
    return f"takes {sum(one.us or 0.0 for one in kernels) / floor_us:.1f}x its floor"


def _scattered(one: Counters) -> str:
    wide = {"load": one.load_sectors, "store": one.store_sectors}
    found = [
        f"a {kind} touches {count:.0f} sectors"
        for kind, count in wide.items()
        if count and count > WIDEST_REQUEST
    ]
    return " and ".join(found)


def _conflicts(one: Counters) -> str:
    if one.conflicts_pct is None or one.conflicts_pct < CONFLICTS_PCT:
        return ""
    return _CONFLICTING.format(one.conflicts_pct)


def _few_warps(one: Counters) -> str:
    """Warps hide latencies; tensor cores that are busy need few."""
    if one.occupancy_pct is None or one.occupancy_pct >= FEW_WARPS_PCT:
        return ""
    if max(one.tensor_pct or 0.0, one.dram_pct or 0.0) >= BUSY_PCT:
        return ""
    takes = [f"{one.registers} registers a thread"] if one.registers else []
    takes += [f"{one.shared_bytes / 1024:.0f} KiB of shared memory a block"] if one.shared_bytes else []
    return f"{one.occupancy_pct:.0f}% of the warps that fit are there" + (
        f", with {' and '.join(takes)}" if takes else ""
    )


def said_of_counts(counts: Counts) -> str:
    """One line on what the twin counted: bytes that are asked for again, scattered requests, conflicts."""
    sentences = []
    if counts.unique_read_bytes:
        times = counts.read_bytes / counts.unique_read_bytes
        sentences.append(f"asks for each byte that it reads {times:.1f} times")
    for kind in ("load", "store"):
        requests = counts.of("global", kind)
        if requests.per_request > WIDEST_REQUEST:
            sentences.append(f"a {kind} touches {requests.per_request:.0f} sectors")
    turns = sum(line.transactions for line in counts.lines if line.memory == "shared")
    if turns and 100 * counts.conflicts / turns >= CONFLICTS_PCT:
        sentences.append(_CONFLICTING.format(100 * counts.conflicts / turns))
    return "; ".join(sentences)
