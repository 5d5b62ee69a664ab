"""Offsets in the arena: no live value is overwritten, and the arena is no larger than its values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from escalade.engine.plan.liveness import ALIGNMENT, Lifetime, assign_offsets, peak_bytes

_SIZES = st.one_of(st.integers(0, 5000), st.sampled_from([0, 1, 255, 256, 257, 1 << 33]))


@st.composite
def _lifetimes(draw: st.DrawFn) -> list[Lifetime]:
    found = []
    for number in range(draw(st.integers(0, 25))):
        first = draw(st.integers(-1, 12))
        found.append(Lifetime(f"v{number}", draw(_SIZES), first, first + draw(st.integers(0, 8))))
    return found


def _rounded(size: int) -> int:
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


@given(_lifetimes())
def test_values_that_live_at_the_same_time_do_not_overlap(values: list[Lifetime]) -> None:
    arena = assign_offsets(values)
    assert set(arena.offsets) == {value.name for value in values}
    for value in values:
        start = arena.offsets[value.name]
        assert start % ALIGNMENT == 0 and start >= 0 and start + value.bytes <= arena.bytes
        for other in values:
            if other is value or not value.overlaps(other):
                continue
            low = arena.offsets[other.name]
            assert start + value.bytes <= low or low + other.bytes <= start
            assert start != low  # not even two that are empty


@given(_lifetimes())
def test_the_total_is_between_the_peak_and_the_sum(values: list[Lifetime]) -> None:
    arena = assign_offsets(values)
    steps = range(-1, 22)
    needed = max(sum(_rounded(v.bytes) for v in values if v.first <= step <= v.last) for step in steps)
    assert sum(v.bytes for v in values if v.first <= 3 <= v.last) == peak_bytes(values, 3, 3)
    assert (
        peak_bytes(values, -1, 21) <= needed <= arena.bytes <= sum(_rounded(value.bytes) for value in values)
    )


@given(_lifetimes(), st.randoms())
def test_places_do_not_depend_on_the_order(values: list[Lifetime], random: object) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert assign_offsets(shuffled) == assign_offsets(values)


def test_meeting_counts_both_ends() -> None:
    early, late = Lifetime("a", 1, 0, 3), Lifetime("b", 1, 3, 4)
    assert early.overlaps(late) and late.overlaps(early)
    assert not early.overlaps(Lifetime("c", 1, 4, 9))


def test_a_chain_needs_two_places() -> None:
    """Each value lives from its step to the next one's."""
    chain = [Lifetime(str(number), 1024, number, number + 1) for number in range(20)]
    assert assign_offsets(chain).bytes == 2048 and assign_offsets(chain).lifetimes == tuple(chain)
    assert (
        peak_bytes(chain, 0, 0) == 1024 and peak_bytes(chain, 0, 19) == 2048 and peak_bytes(chain, 5, 4) == 0
    )
