"""Weights that others may change: every written bit is noticed, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from escalade.engine.weight_guard import WeightSnapshot

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def weights(device: str) -> list[torch.Tensor]:
    """Tensors of all dtypes and sizes, in either layout, with gaps, inside another, with the negative bit, and
    empty."""
    with torch.device(device):  # moved there later, they would be dense
        return [
            torch.randn(8, 4, 3, 3),
            torch.randn(5, 3, 3, 3).contiguous(memory_format=torch.channels_last),
            torch.randn(7).half(),
            torch.randn(3, 3).bfloat16(),
            torch.tensor(3),
            torch.randn(5, 9)[:, 2:7],
            torch.randn(33)[1:],
            torch.randn(6, 5).T,
            torch._neg_view(torch.randn(4)),
            torch.arange(3, dtype=torch.uint8),
            torch.tensor([True, False]),
            torch.randn(0, 4),
            torch.randn(3, dtype=torch.float64),
            torch.tensor([float("nan"), 0.0, -0.0, float("inf")]),
        ]


def flip(tensor: torch.Tensor, bit: int) -> None:
    """One bit of its last element, without PyTorch's version counter."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    memory[last * tensor.element_size() + bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("device", DEVICES)
def test_every_bit_counts(device: str) -> None:
    given = weights(device)
    watched = WeightSnapshot(given)
    assert watched.matches(given)
    for tensor in given:
        if not tensor.numel():
            continue
        for bit in {0, 8 * tensor.element_size() - 1} if tensor.dtype is not torch.bool else {0}:
            before = tensor._version
            flip(tensor, bit)
            assert tensor._version == before, "this is for what PyTorch does not count"
            assert not watched.matches(given), (tensor.dtype, tensor.shape, bit)
            flip(tensor, bit)
            assert watched.matches(given)


@pytest.mark.parametrize("device", DEVICES)
def test_the_copies_hold_the_weights_values(device: str) -> None:
    given = weights(device)
    expected = [tensor.clone() for tensor in given]
    copies = WeightSnapshot(given).copies
    for tensor in given:
        tensor.data.zero_()
    for found, tensor in zip(copies, expected, strict=True):
        torch.testing.assert_close(found, tensor, rtol=0, atol=0, equal_nan=True)
        assert found.data_ptr() % 16 == 0 and found.dtype == tensor.dtype


@pytest.mark.parametrize("device", DEVICES)
def test_addresses_do_not_matter(device: str) -> None:
    given = weights(device)
    watched = WeightSnapshot(given)
    elsewhere = [torch._neg_view(-t) if t.is_neg() else t.clone() for t in given]
    elsewhere[5] = torch.empty(5, 9, device=device)[:, 2:7].copy_(given[5])
    assert watched.matches(elsewhere) and watched.matches(given)
    elsewhere[0].data.mul_(2)
    assert watched.matches(given) and not watched.matches(elsewhere)
    assert not WeightSnapshot(given[:2]).matches([given[0], given[1].contiguous()])
    assert not WeightSnapshot(given[:1]).matches([given[0].view(4, 8, 3, 3)])
    assert not WeightSnapshot(given[:1]).matches([given[0].view(torch.int32)])
    assert WeightSnapshot([]).matches([]) and WeightSnapshot([]).copies == []


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_made_in_inference_mode(device: str) -> None:
    with torch.inference_mode():
        given = weights(device)
        watched = WeightSnapshot(given)
        given[0].mul_(2)
        assert not watched.matches(given)
        given[0].div_(2)
    assert watched.matches(given) and not any(copy.is_inference() for copy in watched.copies)
