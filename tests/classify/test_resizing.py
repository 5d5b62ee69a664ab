"""Photographs of many sizes resized by one launch: Pillow's bytes, on the twin and on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from escalade.device.architecture import ALL_ARCHITECTURES
from escalade.device.nvrtc import compile_program
from escalade.device.run import TwinOptions
from escalade.device.twin import Order
from escalade_apps.classify.images import Crop
from escalade_apps.classify.resizing import MAX_SCALE, PROGRAM, is_supported, resize
from tests.classify.squares import difference

CPU = torch.device("cpu")
sides = st.one_of(st.integers(1, 12), st.integers(1, 400))
crops = st.integers(1, 40).flatmap(
    lambda side: st.integers(side, side + 9).map(lambda size: Crop(size, side))
)
MIXED = [
    (50, 60), (33, 400), (400, 33), (44, 36), (36, 36), (1, 1), (7, 300), (2, 9), (99, 100), (300, 257),
]  # fmt: skip
"""Smaller and larger ones, one of a crop's size, wide ones, and one so high that Pillow 13 resizes vertically first."""


def test_accesses_are_in_order_and_in_bounds(seed: int) -> None:
    """Two tiles in each dimension; the second has one pixel."""
    options = TwinOptions(order=Order(seed=seed), checks=True)
    assert difference([(40, 36), (9, 50), (91, 12)], Crop(36, 33), CPU, seed, options) == ""


@given(st.lists(st.tuples(sides, sides), min_size=1, max_size=4), crops, st.integers(0, 2**32))
def test_photographs_of_any_sizes_are_resized_as_pillow_does_it(
    sizes: list[tuple[int, int]], crop: Crop, seed: int
) -> None:
    assert difference([size for size in sizes if is_supported(*size, crop)], crop, CPU, seed) == ""


def test_a_square_of_many_tiles(seed: int) -> None:
    assert difference([(500, 375), (120, 333)], Crop(256, 224), CPU, seed) == ""


def test_photographs_up_to_the_largest_that_is_taken(seed: int) -> None:
    crop = Crop(2, 2)
    largest = MAX_SCALE * crop.resize
    assert is_supported(largest, largest + 1, crop) and not is_supported(largest + 1, largest + 1, crop)
    assert difference([(largest, largest), (largest + 70, largest)], crop, CPU, seed) == ""


def test_nothing_to_resize() -> None:
    resize({}, Crop(8, 8), torch.empty(0, 8, 8, 3, dtype=torch.uint8))


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_it_compiles_without_a_spill_and_for_many_threads_at_once(architecture: str) -> None:
    resources = compile_program(PROGRAM, architecture).resources
    assert resources.spill_bytes == 0 and resources.stack_bytes == 0
    assert resources.registers <= 64, "four blocks of 256 threads are on a multiprocessor at a time"


@pytest.mark.gpu
def test_a_gpu_gives_pillows_bytes(cuda: torch.device, seed: int) -> None:
    for crop in (Crop(256, 224), Crop(36, 32), Crop(40, 33)):
        sizes = [(width + number, height) for number in range(12) for width, height in MIXED]
        assert difference(sizes, crop, cuda, seed) == ""
    largest = MAX_SCALE * 32
    assert difference([(largest, largest), (500, 375)], Crop(32, 32), cuda, seed) == ""


@pytest.mark.gpu
def test_inputs_may_still_be_written_on_the_stream(cuda: torch.device) -> None:
    """Inputs and the table are read in stream order, and from memory that is still allocated."""
    crop = Crop(36, 32)
    stream = torch.cuda.Stream(cuda)
    with torch.cuda.stream(stream):
        photograph = torch.zeros(3, 50, 60, dtype=torch.uint8, device=cuda)
        squares = torch.empty(1, 32, 32, 3, dtype=torch.uint8, device=cuda)
        resize({0: photograph}, crop, squares)  # already compiled
        torch.cuda._sleep(10**8)
        photograph.fill_(200)
        resize({0: photograph}, crop, squares)
        stream.synchronize()
        assert bool((squares == 200).all())
