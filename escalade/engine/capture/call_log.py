"""Records of the operators that a run on fake tensors calls, to tell whether a model computes the same every time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from escalade.engine.capture.reader import CaptureError


class Constants:
    """Fake tensors that are computed from nothing, and how: a model computes the same ones again, or keeps them."""

    def __init__(self) -> None:
        self.calls = 0
        self._keys: dict[int, Any] = {}
        """The calls that computed the content of each storage, as one number."""
        self._alive: list[torch.Tensor] = []

    def key(self, tensor: FakeTensor) -> Any:
        """Return a comparable key for the content of a constant; None for other tensors."""
        made = self._keys.get(memory_of(tensor)) if tensor.layout is torch.strided else None
        return None if made is None else (made, tensor.stride(), tensor.storage_offset())

    def record(
        self, call: tuple[Any, ...], arguments: Sequence[Any], results: Any, written: set[int]
    ) -> bool:
        """Record the results of a call. Return True if they and the memory that it has `written` to are constants."""
        function = call[0]
        results = [one for one in pytree.tree_leaves(results) if isinstance(one, FakeTensor)]
        tensors = [one for one in arguments if isinstance(one, FakeTensor)]
        if any(one.layout is not torch.strided for one in (*tensors, *results)):
            return False
        is_constant = torch.Tag.nondeterministic_seeded not in function.tags and all(
            memory_of(one) in self._keys for one in tensors
        )
        if is_constant:
            self.calls += 1
            key = hash(call)
            self._keys.update(dict.fromkeys(written, key))
            for one in results:
                if memory_of(one) not in self._keys:
                    self._keys[memory_of(one)] = key
                    self._alive.append(one)  # while it is alive, its storage is not another one's
        else:
            for storage in written:
                self._keys.pop(storage, None)
        return is_constant


class CallLog(TorchDispatchMode):
    """Records calls of operators that read the step's arguments, with fingerprints of their own arguments."""

    def __init__(self, constants: Constants) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.written: set[int] = set()
        """Memory that the calls wrote to."""
        self._constants = constants

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = _written_memory(function, args, kwargs or {}) if function._schema.is_mutable else set()
        self.written |= written
        leaves = pytree.tree_leaves((args, kwargs))
        call = (function, *(_fingerprint(leaf, self._constants) for leaf in leaves))
        results = function(*args, **(kwargs or {}))
        # prim.device is cached by tensors after the first call.
        if function.namespace != "prim" and not self._constants.record(call, leaves, results, written):
            self.calls.append(call)
        return results


def _written_memory(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """Return the memory that a call writes to. Raises CaptureError if it is the caller's."""
    written: set[int] = set()
    for place, argument in enumerate(function._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for one in pytree.tree_leaves(value):
            if isinstance(one, FakeTensor):
                if one.layout is torch.strided:
                    written.add(memory_of(one))
            elif isinstance(one, torch.Tensor):
                raise CaptureError(
                    f"the model or the loss writes to a tensor of {one.dtype} and shape {list(one.shape)} that is none "
                    "of the model's buffers, as a BatchNorm does that only the loss uses: register it as a buffer, and "
                    "pass a loss with modules in it as a torch.nn.Module"
                )
    return written


_FINGERPRINT_ELEMENTS = 64


def _fingerprint(value: Any, constants: Constants) -> Any:
    """Return a comparable key for an argument: for tensors shape and dtype, and the first elements of real ones."""
    if not isinstance(value, torch.Tensor):
        return repr(value) if isinstance(value, float) else value
    if isinstance(value, FakeTensor):
        return value.shape, value.dtype, constants.key(value)
    with _disable_current_modes():
        return value.shape, value.dtype, repr(value.detach().flatten()[:_FINGERPRINT_ELEMENTS].tolist())


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
