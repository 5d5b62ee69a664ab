"""Reused memory: layouts, growth, and several tensors in one allocation."""

from __future__ import annotations

import torch

from escalade.device.staging import StagingBuffer, is_dense

HOST = torch.device("cpu")


def test_staging_memory_has_the_shape_dtype_and_layout_of_its_tensor() -> None:
    image = torch.zeros(2, 3, 5, 7, dtype=torch.uint8).to(memory_format=torch.channels_last)
    logits = torch.zeros(2, 10, dtype=torch.float16)
    rooms = StagingBuffer(HOST).like([image, logits])
    assert [(room.shape, room.dtype, room.stride()) for room in rooms] == [
        (tensor.shape, tensor.dtype, tensor.stride()) for tensor in (image, logits)
    ]
    assert StagingBuffer(HOST).like([logits], [torch.float32])[0].dtype == torch.float32


def test_rooms_of_one_batch_do_not_overlap() -> None:
    staging = StagingBuffer(HOST)
    rooms = staging.like([torch.zeros(3, 5, dtype=torch.uint8), torch.zeros(7), torch.zeros(1)])
    for number, room in enumerate(rooms):
        room.fill_(number + 1)
    assert [float(room.float().mean()) for room in rooms] == [1, 2, 3]


def test_memory_is_reused_and_grows_to_the_largest() -> None:
    staging = StagingBuffer(HOST)
    staging.like([torch.zeros(10)])
    (large,) = staging.like([torch.zeros(1000)])
    assert staging.bytes == 4096
    (again,) = staging.like([torch.zeros(10)])
    assert again.data_ptr() == large.data_ptr() and staging.bytes == 4096
    assert staging.like([torch.zeros(0, 3)])[0].shape == (0, 3)


def test_dense_means_nothing_between_the_elements() -> None:
    x = torch.zeros(2, 3, 4, 6)
    assert is_dense(x) and is_dense(x.to(memory_format=torch.channels_last))
    assert not is_dense(x[..., ::2]) and not is_dense(x.transpose(0, 1))
    (room,) = StagingBuffer(HOST).like([x[..., ::2]])
    assert room.is_contiguous() and room.shape == (2, 3, 4, 3)
