"""Stands for Triton: programs of a kernel one after another over PyTorch's tensors, with every config in turn.

A place outside of a tensor that a mask lets through is an error, as is a config that gives another result than the
one before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

AGREE = 1e-3


class Pointer:
    """An address in a tensor's memory, or a block of them."""

    def __init__(self, memory: torch.Tensor, places: Any = 0) -> None:
        self.memory, self.places = memory, places
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, places: Any) -> Pointer:
        return Pointer(self.memory, self.places + places)

    def seen(self, mask: torch.Tensor) -> torch.Tensor:
        places = self.places[mask.expand(self.places.shape)]
        if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < self.memory.numel():
            raise IndexError("a place outside of the tensor")
        return torch.where(mask, self.places, 0)


class Language(ModuleType):
    """`triton.language`, as far as kernels use it."""

    constexpr, tensor = object, object
    float32, int32 = torch.float32, torch.int32
    cdiv = staticmethod(lambda whole, part: -(-whole // part))
    arange = staticmethod(torch.arange)
    zeros = staticmethod(torch.zeros)
    maximum = staticmethod(lambda one, other: one.clamp_min(other))

    def __init__(self) -> None:
        super().__init__("triton.language")
        self.program = 0
        self.precisions: set[str] = set()

    def program_id(self, axis: int) -> int:
        assert axis == 0
        return self.program

    def load(self, pointer: Pointer, mask: torch.Tensor, other: float) -> torch.Tensor:
        return torch.where(mask, pointer.memory[pointer.seen(mask)], other)

    def store(self, pointer: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
        pointer.seen(mask)
        pointer.memory[pointer.places[mask]] = value[mask]

    def dot(
        self, a: torch.Tensor, b: torch.Tensor, total: torch.Tensor, input_precision: str
    ) -> torch.Tensor:
        self.precisions.add(input_precision)
        return total + a.float() @ b.float()


class Tuned:
    """A kernel with its configs."""

    def __init__(
        self, language: Language, kernel: Callable[..., None], configs: Sequence[Any], prune: Any
    ) -> None:
        self._language, self._kernel, self._prune = language, kernel, prune
        self.configs = configs
        self.best_config: Any = None

    def __getitem__(self, grid: Callable[[dict[str, int]], tuple[int]]) -> Callable[..., None]:
        def launch(*tensors: Any, **constants: Any) -> None:
            names = self._kernel.__code__.co_varnames
            pointers = [
                Pointer(one.permute(0, 2, 3, 1).reshape(-1) if one.dim() == 4 else one)
                if torch.is_tensor(one)
                else one
                for one in tensors
            ]
            y, before = pointers[4].memory, None
            for config in self._prune(self.configs, dict(zip(names, tensors, strict=False)), **constants):
                y.fill_(math.nan)
                for self._language.program in range(*grid(config.kwargs)):
                    self._kernel(*pointers, **constants, **config.kwargs)
                assert before is None or torch.allclose(y, before, AGREE, AGREE), config
                self.best_config, before = config, y.clone()

        return launch


def modules() -> dict[str, ModuleType]:
    """What `import triton` and `import triton.language` give."""
    language, triton = Language(), ModuleType("triton")
    triton.language = language  # type: ignore[attr-defined]
    triton.jit = lambda kernel: kernel  # type: ignore[attr-defined]
    triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()  # type: ignore[attr-defined]
    triton.Config = lambda kwargs, **rest: SimpleNamespace(kwargs=kwargs, **rest)  # type: ignore[attr-defined]

    def autotune(
        configs: Sequence[Any], key: Sequence[str], prune_configs_by: dict[str, Any], do_bench: Any
    ) -> Any:
        def tuned(kernel: Callable[..., None]) -> Tuned:
            known = kernel.__code__.co_varnames
            assert all(name in known for name in itertools.chain(key, *(config.kwargs for config in configs)))
            return Tuned(language, kernel, configs, prune_configs_by["early_config_prune"])

        return tuned

    triton.autotune = autotune  # type: ignore[attr-defined]
    return {"triton": triton, "triton.language": language}
