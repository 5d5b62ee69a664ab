"""The runtime for C++ programs on the stub driver, with the twin as its GPU; a separate program.

`python -m tests.engine.cpp.twin_driver FOLDER SCRATCH` loads the stub from FOLDER. A test's process must not: its
driver would be the stub from then on.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from escalade.device import twin
from escalade.device.arguments import ArgumentList
from escalade.device.nvrtc import compile_program
from escalade.device.program import Program
from escalade.device.recipe import KernelCall
from escalade.device.twin import tensor_map
from escalade.engine import Engine, compile
from escalade.engine.plan.plan import Plan
from escalade.ops.base.cards import typical_card

ARCHITECTURE = "sm_90a"
_ELEMENT_BYTES = {0: 1, 6: 2, 7: 4, 9: 2}
"""Bytes of the element types of tensor maps, by their number in cuda.h."""
_SWIZZLES = (0, 32, 64, 128)


class Net(nn.Module):
    """Packed weights, counters, tensor maps, a second result, and a result that is a view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 128, 1)
        self.third = nn.Conv2d(128, 128, 3, padding=1, stride=2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(self.second(torch.relu(self.first(x))))
        z = self.third(y)
        return z, z.mean((2, 3)), z.flatten(1)


def network() -> tuple[Net, Engine]:
    torch.manual_seed(0)
    model = Net().eval()
    return model, compile(model, torch.randn(2, 64, 16, 16), dtype="fp16", batches=[1, 2])


class TwinDriver:
    """The stub driver, with the twin as its GPU."""

    def __init__(self, library: pathlib.Path, plan: Plan) -> None:
        self._stub = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._programs: list[Program] = list(plan.programs)
        self._codes = [compile_program(each, ARCHITECTURE).code for each in self._programs]
        steps = [step for each in plan.steps if each.recipe for step in each.recipe.steps]
        self._arguments = {each.program: each.arguments for each in steps if isinstance(each, KernelCall)}
        self.faults: list[str] = []
        kinds = (
            ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p),
            ctypes.CFUNCTYPE(
                ctypes.c_int, ctypes.c_long, ctypes.POINTER(ctypes.c_uint), ctypes.c_uint, ctypes.c_int,
                ctypes.POINTER(ctypes.c_void_p),
            ),
            ctypes.CFUNCTYPE(
                ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_ulonglong,
                *(ctypes.POINTER(ctypes.c_ulonglong),) * 2, ctypes.POINTER(ctypes.c_uint), ctypes.c_int,
            ),
        )  # fmt: skip
        functions: tuple[Callable[..., int], ...] = (self._load, self._launch, self._encode)
        self._hooks = [kind(self._guarded(each)) for kind, each in zip(kinds, functions, strict=True)]
        self._stub.stub_hooks(*self._hooks)

    def unhook(self) -> None:
        self._stub.stub_hooks(None, None, None)

    @property
    def allocations(self) -> int:
        return int(self._stub.stub_allocations())

    def _guarded(self, function: Callable[..., int]) -> Callable[..., int]:
        def called(*arguments: Any) -> int:
            try:
                return function(*arguments)
            except Exception as error:
                self.faults.append(repr(error))
                return 1

        return called

    def _load(self, image: int) -> int:
        return next(
            index for index, code in enumerate(self._codes) if ctypes.string_at(image, len(code)) == code
        )

    def _launch(self, module: int, sizes: Any, shared: int, overlap: int, parameters: Any) -> int:
        program = self._programs[module]
        kinds = ArgumentList(self._arguments[program], lambda *_: bytes(128)).values
        values = [type(kind).from_address(parameters[index]) for index, kind in enumerate(kinds)]
        kernel = twin.build(program.text(), program.entry, name=program.source)
        grid, block, cluster = (tuple(sizes[at : at + 3]) for at in (0, 3, 6))
        kernel.launch(grid, block, values, shared_bytes=shared, cluster=cluster, overlap=bool(overlap))
        return 0

    def _encode(
        self,
        target: int,
        kind: int,
        rank: int,
        address: int,
        sizes: Any,
        strides: Any,
        box: Any,
        swizzle: int,
    ) -> int:
        encoded = tensor_map.encode_tiled(
            address, _ELEMENT_BYTES[kind], sizes[:rank], strides[: rank - 1], box[:rank], _SWIZZLES[swizzle]
        )
        ctypes.memmove(target, encoded, len(encoded))
        return 0


def _run(
    library: pathlib.Path, plans: pathlib.Path, x: torch.Tensor, outputs: Sequence[torch.Tensor], calls: int
) -> str:
    """Run a plan through the runtime; returns the error message."""
    bridge = ctypes.CDLL(str(library))
    pointers = (ctypes.c_void_p * len(outputs))(*(each.data_ptr() for each in outputs))
    reason = ctypes.create_string_buffer(500)
    inputs = (ctypes.c_void_p * 1)(x.data_ptr())
    bridge.bridge_run(
        os.fsencode(plans), ctypes.c_long(len(x)), calls, inputs, pointers, reason, ctypes.c_size_t(500)
    )
    return reason.value.decode()


def compute(folder: pathlib.Path, scratch: pathlib.Path) -> pathlib.Path:
    """Run a network twice, on tensors in different places, and compare its results with the model's."""
    model, engine = network()
    plans = engine.export_cpp(scratch, kernels=ARCHITECTURE)
    x = torch.randn(2, 64, 16, 16)
    plan = engine.plan_for(typical_card(ARCHITECTURE), x)
    driver = TwinDriver(folder / "libcuda.so.1", plan)
    expected, forms = [each.detach() for each in model(x)], [plan.forms[name] for name in plan.graph.outputs]
    assert [form.dtype for form in forms] == [torch.float32, torch.float16, torch.float16]
    outputs = [torch.full(form.shape, float("nan"), dtype=form.dtype) for form in forms]
    said = _run(folder / "bridge.so", plans, x, outputs, calls=2)
    assert not said and not driver.faults, (said, driver.faults)
    for result, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(result.float(), wanted, rtol=1e-2, atol=1e-2)
    assert not driver.allocations, "memory was not freed"
    driver.unhook()
    return plans


def truncate(folder: pathlib.Path, plans: pathlib.Path) -> None:
    """Read files truncated anywhere, with matching checksums: errors, not crashes."""
    data = plans.read_bytes()
    head, body, broken = data[:16], data[32:], plans.with_name("broken")
    x, outputs = torch.zeros(1, 64, 16, 16), [torch.zeros(size) for size in (8192, 128, 8192)]
    for size in np.linspace(0, len(body) - 1, 60).astype(int):
        part = body[:size]
        broken.write_bytes(head + struct.pack("<IIQ", 1, zlib.crc32(part), len(part)) + part)
        assert "is damaged" in _run(folder / "bridge.so", broken, x, outputs, calls=1), size


if __name__ == "__main__":
    given = pathlib.Path(sys.argv[1])
    truncate(given, compute(given, pathlib.Path(sys.argv[2])))
    print("all right")
