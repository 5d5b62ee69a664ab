"""Stands for ONNX Runtime and TensorRT: sessions and engines that run the very model that was exported, over the bytes
at the addresses that they were given."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from escalade.bench.peers import onnxruntime_network, tensorrt_network
from tests.bench.fake_cuda import Card

MODELS: dict[bytes, tuple[nn.Module, tuple[int, ...]]] = {}
"""What was exported, by its bytes, with the size of its input."""
_NUMBERS = itertools.count()


def export(model: nn.Module, x: torch.Tensor) -> bytes:
    assert x.is_contiguous(), "ONNX knows no channels_last"
    name = f"model {next(_NUMBERS)}".encode()
    MODELS[name] = model, tuple(x.shape)
    return name


def at(address: int, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The memory at an address as a tensor."""
    count = int(np.prod(size))
    block = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(block, dtype=dtype).view(*size)


class Binding:
    """Addresses by name; of what kind and on which device is checked when they come."""

    def __init__(self) -> None:
        self.bound: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}

    def bind_input(self, name: str, kind: str, index: int, element: Any, size: Any, address: int) -> None:
        assert (kind, index) == ("cpu", 0)
        self.bound[name] = address, size, {np.float32: torch.float32, np.float16: torch.float16}[element]

    bind_output = bind_input


class Session:
    """A session of ONNX Runtime."""

    def __init__(self, package: OnnxRuntime, model: bytes, providers: Sequence[Any]) -> None:
        (self._model, self._size), self._package = MODELS[model], package
        package.asked.append(providers[0])

    def get_providers(self) -> list[str]:
        return self._package.loaded

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(name="y0")]

    def io_binding(self) -> Binding:
        return Binding()

    def run_with_iobinding(self, binding: Binding, options: dict[str, str]) -> None:
        assert options == {"disable_synchronize_execution_providers": "1"}
        assert binding.bound["x"][1] == self._size

        def work() -> None:
            with torch.no_grad():
                at(*binding.bound["y0"]).copy_(self._model(at(*binding.bound["x"])))

        self._package.kernel(work)


class Options(dict[str, str]):
    def add_run_config_entry(self, name: str, value: str) -> None:
        self[name] = value


class OnnxRuntime(ModuleType):
    """The package; what it offers and what it loads are as a test says."""

    def __init__(self, card: Card | None = None) -> None:
        super().__init__("onnxruntime")
        self.__spec__ = ModuleSpec("onnxruntime", None)
        self.offered = self.loaded = [onnxruntime_network.CPU]
        self.asked: list[Any] = []
        self.kernel = (lambda work: card.kernel(5.0, work)) if card else (lambda work: work())
        self.RunOptions = Options

    def get_available_providers(self) -> list[str]:
        return self.offered

    def InferenceSession(self, model: bytes, providers: Sequence[Any]) -> Session:
        return Session(self, model, providers)


class TensorRT(ModuleType):
    """The package: builder, network, parser, config, engine and context are one object each."""

    ERROR = 2

    def __init__(self, card: Card) -> None:
        super().__init__("tensorrt")
        self.__spec__ = ModuleSpec("tensorrt", None)
        self._card = card
        self.flags: dict[str, bool] = {}
        self.num_io_tensors = 2
        self.readable = True
        self.addresses: dict[str, int] = {}
        self.builder_optimization_level = 0
        self.NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
        self.BuilderFlag = SimpleNamespace(TF32="tf32")
        self.Logger = lambda level: None
        self.Logger.ERROR = 2  # type: ignore[attr-defined]
        for name in ("Builder", "OnnxParser", "Runtime", "create_builder_config", "create_execution_context"):
            setattr(self, name, lambda *given: self)

    def create_network(self, flags: int) -> TensorRT:
        assert flags == 2, "strongly typed"
        return self

    def parse(self, model: bytes) -> bool:
        self._model, self._size = MODELS[model]
        return self.readable

    def get_error(self, index: int) -> Any:
        return SimpleNamespace(desc=lambda: "an operator that it does not know")

    def set_flag(self, flag: str) -> None:
        self.flags[flag] = True

    def clear_flag(self, flag: str) -> None:
        self.flags[flag] = False

    def build_serialized_network(self, network: object, config: object) -> bytes:
        return b"plan"

    def deserialize_cuda_engine(self, plan: bytes) -> TensorRT:
        return self

    def get_tensor_name(self, index: int) -> str:
        return ("x", "y0")[index]

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def execute_async_v3(self, stream: int) -> bool:
        x, y = self.addresses["x"], self.addresses["y0"]

        def work() -> None:
            with torch.no_grad():
                dtype = next(self._model.parameters()).dtype
                right = self._model(at(x, self._size, dtype))
                at(y, right.shape, dtype).copy_(right)

        self._card.kernel(5.0, work)
        return True


def installed(monkeypatch: pytest.MonkeyPatch, package: ModuleType) -> None:
    """Puts the package, and what exports for it, in the place of the real ones."""
    for name in (package.__name__, "onnx", "onnxscript"):
        module = package if name == package.__name__ else ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    for user in (onnxruntime_network, tensorrt_network):
        monkeypatch.setattr(user, "exported", export)
