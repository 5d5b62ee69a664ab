"""What a model asks of the numbers that it holds while `torch.export` runs it on tensors without contents.

A buffer may say how often to repeat something, or whether statistics have been taken already. An engine has the weights
as they are now, so what depends on them alone has an answer. What depends on inputs has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_tensor: Any = torch.Tensor
_QUESTIONS: frozenset[Callable[..., Any]] = frozenset(
    {
        *(getattr(_tensor, name) for name in ("item", "tolist", "numpy", "__array__", "is_nonzero", "equal")),
        *(getattr(_tensor, f"__{name}__") for name in ("bool", "int", "float", "complex", "index")),
        *(torch.is_nonzero, torch.equal, torch.allclose, _tensor.allclose),
    }
)
"""Functions that give no tensor, but what is in one."""
_IN_PLACE = ("__iadd", "__isub", "__imul", "__idiv", "__itrue", "__ifloor", "__imod", "__ipow", "__iand", "__ior",
             "__ixor", "__ilshift", "__irshift", "__imatmul")  # fmt: skip
_GET_DATA, _SET_DATA = _tensor.data.__get__, _tensor.data.__set__


class Contents(TorchFunctionMode):
    """Answers what a model asks of numbers that are known, and has it change tensors through `data` as `detach` would:
    `torch.export` sees the one and not the other."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[torch.Tensor, Callable[[], torch.Tensor]]] = {}
        """What makes the numbers of a tensor without contents, by its identity, and the tensor, which keeps that."""
        self._writes = False
        """Whether the model has written to a tensor: any may have been a view of that one, and none is known now."""

    def know(self, hollow: torch.Tensor, numbers: torch.Tensor) -> None:
        """Has a tensor of the model's stand for these numbers."""
        self._known[id(hollow)] = (hollow, lambda: numbers)

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        if function == _GET_DATA:
            return self.__torch_function__(torch.Tensor.detach, types, arguments)
        if function == _SET_DATA and arguments[0].shape == arguments[1].shape:
            self._writes = True
            arguments[0].detach().copy_(arguments[1])
            return None
        call = self._numbers_of(function, arguments, keywords)
        if function in _QUESTIONS and call is not None:
            return call()
        result = function(*arguments, **keywords)
        self._writes |= _may_write(function, keywords)
        if call is not None and isinstance(result, torch.Tensor):
            self._known[id(result)] = (result, call)
        return result

    def _numbers_of(self, function: Any, arguments: Any, keywords: Any) -> Callable[[], Any] | None:
        """What makes the result of a call where all of its tensors are known; None if not all are, or it has none."""
        leaves, structure = pytree.tree_flatten((arguments, keywords))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self._writes or not tensors or not all(map(self._is_known, tensors)):
            return None
        makers = [known[1] if (known := self._known.get(id(leaf))) else None for leaf in leaves]

        def made() -> Any:
            numbers = [leaf if make is None else make() for leaf, make in zip(leaves, makers, strict=True)]
            given, named = pytree.tree_unflatten(numbers, structure)
            with _disable_current_modes(), torch._C.DisableTorchFunction(), _Determined(), torch.no_grad():
                return function(*given, **named)

        return made

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Whether it stands for numbers, or has them itself as an attribute that is neither parameter nor buffer."""
        plain = (
            type(tensor) is torch.Tensor and not tensor.is_meta and not torch._is_functional_tensor(tensor)
        )
        return plain or id(tensor) in self._known


def _may_write(function: Any, keywords: Mapping[str, Any]) -> bool:
    """Whether a function may change one of its tensors, by its name."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith(("__set", *_IN_PLACE)) or keywords.get("out") is not None


class _Determined(TorchDispatchMode):
    """Nothing is drawn: what comes of random numbers is known to nobody."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise RuntimeError(f"data-dependent: {function} draws random numbers")
        return function(*arguments, **(keywords or {}))


def answer(model: torch.nn.Module) -> None:
    """Has a model whose tensors `torch.export` is going to replace ask for the numbers that it holds now."""
    numbers = {name: tensor.detach() for name, tensor in _held(model)}
    forward = model.forward

    @functools.wraps(forward)
    def answered(*arguments: Any, **keywords: Any) -> Any:
        contents = Contents()
        for name, tensor in _held(model):
            if name in numbers:
                contents.know(tensor, numbers[name])
        with contents:
            return forward(*arguments, **keywords)

    model.forward = answered  # hooks that are called whatever happens are not while PyTorch compiles


def _held(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
