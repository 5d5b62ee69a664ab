"""Pointers into the arguments of launches."""

from __future__ import annotations

from typing import Any

import pytest

from escalade.device import arguments
from escalade.device.arguments import TENSOR_MAP_BYTES, ArgumentList, BufferPointers
from escalade.device.recipe import Buffer, Int64, TensorMap, TiledMap


def encoder(seen: list[int]) -> Any:
    def encode(tensor_map: TensorMap, address: int) -> bytes:
        seen.append(address)
        return address.to_bytes(8, "little") * (TENSOR_MAP_BYTES // 8)

    return encode


def test_only_named_pointers_change() -> None:
    first = ArgumentList((Buffer("x"), Int64(7), Buffer("y", 8), Buffer("x", 16)), encoder([]))
    second = ArgumentList((Buffer("y"), Buffer("w")), encoder([]))
    first.point({"x": 1000, "y": 2000})
    second.point({"y": 2000, "w": 3000})
    x, y = BufferPointers(), BufferPointers()
    x.add(first, "x")
    y.add(first, "y")
    y.add(second, "y", 256)
    x.point(5000)
    assert [value.value for value in first.values] == [5000, 7, 2008, 5016]
    y.point(6000)
    assert [value.value for value in first.values] == [5000, 7, 6008, 5016]
    assert [value.value for value in second.values] == [6256, 3000]


def test_tensor_maps_are_encoded_when_the_address_is_another() -> None:
    seen: list[int] = []
    launch = ArgumentList((TiledMap(Buffer("x", 32), "fp16", (8, 8), (8, 8)),), encoder(seen))
    launch.point({"x": 1024})
    x = BufferPointers()
    x.add(launch, "x", 64)
    for address in (4096, 4096, 8192):
        x.point(address)
    assert seen == [1024 + 32, 4096 + 96, 8192 + 96]
    assert bytes(launch.values[0])[:8] == (8192 + 96).to_bytes(8, "little")


def test_a_bounded_number_of_tensor_maps_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_MOST_ADDRESSES", 2)
    seen: list[int] = []
    launch = ArgumentList((TiledMap(Buffer("x"), "fp16", (8, 8), (8, 8)),), encoder(seen))
    x = BufferPointers()
    x.add(launch, "x")
    for address in (1024, 2048, 1024, 4096, 2048, 1024):  # the third address replaces the first
        x.point(address)
        assert bytes(launch.values[0])[:8] == address.to_bytes(8, "little")
    assert seen == [1024, 2048, 4096, 1024]


def test_a_launch_added_later_gets_its_tensor_map_for_an_address_already_encoded() -> None:
    first, second = (
        ArgumentList((TiledMap(Buffer("x", offset), "fp16", (8, 8), (8, 8)),), encoder([]))
        for offset in (0, 32)
    )
    x = BufferPointers()
    x.add(first, "x")
    x.point(4096)
    x.add(second, "x")
    x.point(4096)
    assert [bytes(one.values[0])[:8] for one in (first, second)] == [
        address.to_bytes(8, "little") for address in (4096, 4096 + 32)
    ]
