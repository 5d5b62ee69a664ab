"""Batches: every image once per epoch, the same in any number of processes and for images in any memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from escalade_apps.train.augmentation import Augmentation, Moves, moved
from escalade_apps.train.batches import Batch, Batches, Normalization, order, sequential_batches
from escalade_apps.train.data.images import Images
from escalade_apps.train.data.synthetic import make
from escalade_apps.train.tasks import task_of

IMAGES = make(23, 8, 0, "train")
CPU = torch.device("cpu")


def batches(
    rank: int = 0, processes: int = 1, resident: bool = True, seed: int = 3, batch: int = 6
) -> Batches:
    return Batches(
        IMAGES, batch, CPU, seed=seed, augmentation=Augmentation(True, 2), rank=rank, processes=processes,
        resident=resident,
    )  # fmt: skip


def pixels(found: list[Batch]) -> torch.Tensor:
    return torch.stack([each.pixels for each in found])


def test_epochs_have_orders_of_their_own_and_can_be_entered_anywhere() -> None:
    whole = list(batches().epoch(0))
    assert len(whole) == 3 and not torch.equal(pixels(whole), pixels(list(batches().epoch(1))))
    assert not torch.equal(pixels(whole), pixels(list(batches(seed=4).epoch(0))))
    assert torch.equal(pixels(whole)[1:], pixels(list(batches().epoch(0, 1))))
    orders = [order(seed, epoch, 23).tolist() for seed, epoch in ((3, 0), (3, 1), (4, 0), (3, 0))]
    assert orders[0] == orders[3] and len({tuple(each) for each in orders}) == 3
    assert all(sorted(each) == list(range(23)) for each in orders)
    plain = Batches(IMAGES, 6, CPU, seed=3, augmentation=Augmentation())
    seen = torch.cat([each.pixels for each in plain.epoch(5)]).flatten(1)
    known = {tuple(row) for row in IMAGES.pixels.flatten(1).tolist()}
    assert len({tuple(row) for row in seen.tolist()} & known) == 18


def test_images_are_moved_otherwise_in_every_epoch_and_by_every_seed() -> None:
    augmentation = Augmentation(flip=True, shift=2)
    drawn = [augmentation.moves(seed, epoch, 400) for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))]
    for name in ("flips", "shifts"):
        first, *others, again = (getattr(each, name) for each in drawn)
        assert torch.equal(first, again)
        assert not any(torch.equal(first, each) for each in others), name
    assert drawn[0].flips.unique().tolist() == [0, 1] and 120 < int(drawn[0].flips.sum()) < 280
    for column in drawn[0].shifts.T:
        assert column.unique().tolist() == [-2, -1, 0, 1, 2]
    assert not torch.equal(*drawn[0].shifts.T)
    still = Augmentation(flip=False, shift=1).moves(0, 0, 50)
    assert not still.flips.any() and still.shifts.any()
    epochs = [torch.cat([each.pixels for each in batches().epoch(number)]) for number in (0, 1)]
    known = [{tuple(row) for row in each.flatten(1).tolist()} for each in epochs]
    assert len(known[0] & known[1]) < 9, "of 18 images in each, few are moved alike twice"


def test_processes_share_the_batches_of_one() -> None:
    one, both = list(batches().epoch(2)), [list(batches(rank, 2).epoch(2)) for rank in range(2)]
    assert torch.equal(pixels(one), torch.cat([pixels(each) for each in both], 1))
    whole = torch.cat(
        [
            each.pixels
            for rank in range(2)
            for each in sequential_batches(IMAGES, 4, CPU, rank=rank, processes=2)
        ]
    )
    assert torch.equal(whole, torch.cat([IMAGES.pixels[::2], IMAGES.pixels[1::2]]))


def test_streamed_batches_are_those_that_stay_on_the_device() -> None:
    # More batches than are in flight at a time, all of them kept: none may be overwritten.
    streamed, resident = (list(batches(resident=where, batch=2).epoch(1)) for where in (False, True))
    assert len(streamed) == 11 and torch.equal(pixels(streamed), pixels(resident))
    for one, other in zip(streamed, resident, strict=True):
        assert one.labels is not None and other.labels is not None and torch.equal(one.labels, other.labels)
    assert len(list(itertools.islice(batches(resident=False).epoch(0), 1))) == 1  # and its thread ends


def test_images_are_turned_and_shifted() -> None:
    image = torch.arange(12, dtype=torch.uint8).view(1, 3, 4, 1)
    found = moved(image, Moves(torch.tensor([0]), torch.tensor([[1, -1]]))).squeeze()
    assert found.tolist() == [[5, 4, 5, 6], [9, 8, 9, 10], [5, 4, 5, 6]], (
        "rows by the first, columns by the second"
    )
    row = torch.arange(4, dtype=torch.uint8).view(1, 1, 4, 1).expand(3, 1, 4, 1)
    found = moved(row, Moves(torch.tensor([0, 1, 0]), torch.tensor([[0, 0], [0, 0], [0, -2]])))
    assert found.squeeze().tolist() == [[0, 1, 2, 3], [3, 2, 1, 0], [2, 1, 0, 1]]


def test_gray_images_are_converted_to_color_and_back() -> None:
    grey = Batch(IMAGES.pixels[..., :1], None)
    normalization = Normalization((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    found = grey.images(normalization)
    assert found.shape == (23, 3, 8, 8) and found.is_contiguous(memory_format=torch.channels_last)
    for channel, (mean, std) in enumerate(zip((0.4, 0.5, 0.6), (0.2, 0.3, 0.4), strict=True)):
        torch.testing.assert_close(found[:, channel], (IMAGES.pixels[..., 0] / 255 - mean) / std)
    colors = Batch(IMAGES.pixels, None).images(normalization)
    torch.testing.assert_close(colors[:, 2], (IMAGES.pixels[..., 2] / 255 - 0.6) / 0.4)
    assert torch.equal(normalization.invert(colors), IMAGES.pixels)
    assert torch.equal(normalization.invert(found), IMAGES.pixels[..., :1].expand(-1, -1, -1, 3))


def test_large_images_are_normalized_as_imagenets() -> None:
    small, large = (Images(torch.zeros(1, side, side, 3, dtype=torch.uint8), None) for side in (64, 65))
    task = task_of("resnet18")
    mean, scale = task.normalization(large).on(CPU)
    torch.testing.assert_close(mean / 255, torch.tensor([0.485, 0.456, 0.406]))
    torch.testing.assert_close(1 / scale / 255, torch.tensor([0.229, 0.224, 0.225]))
    assert [each.tolist() for each in task.normalization(small).on(CPU)] == [
        [0] * 3,
        pytest.approx([1 / 255] * 3),
    ]


@pytest.mark.gpu
def test_batches_on_the_gpu_are_those_of_the_cpu(cuda: torch.device) -> None:
    """Streamed through pinned memory many times over, so that a slot filled too early would show."""
    images = make(500, 16, 0, "train")
    for resident in (True, False):
        for epoch in range(3):
            found, expected = (
                list(
                    Batches(
                        images, 20, device, seed=1, augmentation=Augmentation(True, 3), resident=where
                    ).epoch(epoch)
                )
                for device, where in ((cuda, resident), (CPU, True))
            )
            assert torch.equal(pixels(found).cpu(), pixels(expected))
