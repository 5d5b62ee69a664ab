"""PyTorch's products at the precision that is asked for, whatever the process has set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from escalade.device.torch_private import FAST_PATHS

_CUDNN: Any = torch.backends.cudnn
_FIRST = ("enabled", "benchmark", "benchmark_limit", "allow_tf32")
# PyTorch 2.9 has a second set of switches for TF32, which counts: the first sets it only in part, and where the two
# disagree it cannot even be read. Both are set, and both are put back, the second last.
_SECOND: tuple[Any, ...] = (
    (torch.backends.cuda.matmul, _CUDNN.conv, _CUDNN.rnn, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    if hasattr(_CUDNN, "conv")
    else ()
)


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """TF32 only where the dtype says so, and cuDNN choosing by measurement among all it has (limit 0).

    PyTorch remembers the first choice for a problem, however it was made: a single call without `benchmark` would fix
    every later one of the process to what cuDNN guesses. The switches are the process's, not the thread's.
    """
    put_back = noted()
    try:
        with FAST_PATHS.allow_flag_changes():
            torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
            _CUDNN.enabled = _CUDNN.benchmark = True
            _CUDNN.allow_tf32 = dtype == "tf32"
            if _CUDNN.is_available():
                _CUDNN.benchmark_limit = 0
            for one in _SECOND:
                one.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
        yield
    finally:
        put_back()


def noted() -> Callable[[], None]:
    """Puts all of the switches back as they are now, when it is called."""
    matmul = _told(torch.get_float32_matmul_precision)
    first = {name: _told(getattr, _CUDNN, name) for name in _FIRST}
    second = [one.fp32_precision for one in _SECOND]

    def put_back() -> None:
        with FAST_PATHS.allow_flag_changes():
            if matmul is not None:
                torch.set_float32_matmul_precision(matmul)
            for name, value in first.items():
                if value is not None:
                    setattr(_CUDNN, name, value)
            for one, value in zip(_SECOND, second, strict=True):
                one.fp32_precision = value

    return put_back


def with_cudnn(dtype: str, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What it gives with cuDNN at its best, and TF32 products only where asked for."""
    with precision(dtype):
        return compute()


def round_to_tf32(values: torch.Tensor) -> torch.Tensor:
    """Rounds to 10 bits of mantissa, nearest, as the tensor cores' conversion does; infinities and NaN stay."""
    bits = values.view(torch.int32)
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values)


def tf32_allowed() -> bool:
    """Whether PyTorch now has it for convolutions and for matrix products."""
    if _SECOND:
        return all(one.fp32_precision == "tf32" for one in (torch.backends.cuda.matmul, _CUDNN.conv))
    return bool(torch.backends.cuda.matmul.allow_tf32 and _CUDNN.allow_tf32)


def _told(question: Callable[..., Any], *of: Any) -> Any:
    """None where PyTorch refuses to say, or has nothing to say."""
    try:
        return question(*of)
    except RuntimeError:
        return None
