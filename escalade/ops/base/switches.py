"""Set PyTorch's matmul and convolution precision, regardless of the process's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from escalade.device.torch_private import FAST_PATHS

_CUDNN: Any = torch.backends.cudnn
_USUAL_ALGORITHMS = 10
"""PyTorch's own default."""
_LEGACY_FLAGS = ("enabled", "benchmark", "benchmark_limit", "allow_tf32")
# PyTorch 2.9 added a second TF32 API that takes precedence. The old flags set it only in part, and reading raises if
# the two disagree. So we set and restore both, the new one last.
_FP32_PRECISION: tuple[Any, ...] = (
    (torch.backends.cuda.matmul, _CUDNN.conv, _CUDNN.rnn, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    if hasattr(_CUDNN, "conv")
    else ()
)


@contextmanager
def precision(dtype: str, algorithms: int = _USUAL_ALGORITHMS) -> Iterator[None]:
    """Allow TF32 only if `dtype` is tf32, and let cuDNN benchmark its most promising `algorithms`; all of them if 0,
    which takes up to a minute for a whole network.

    PyTorch caches the first algorithm per problem even if chosen without `benchmark`: one such call would pin every
    later call to cuDNN's heuristic. The flags are process-wide, not per thread.
    """
    restore = save_flags()
    try:
        with FAST_PATHS.allow_flag_changes():
            torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
            _CUDNN.enabled = _CUDNN.benchmark = True
            _CUDNN.allow_tf32 = dtype == "tf32"
            if _CUDNN.is_available():
                _CUDNN.benchmark_limit = algorithms
            for backend in _FP32_PRECISION:
                backend.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
        yield
    finally:
        restore()


def save_flags() -> Callable[[], None]:
    """Save all flags; the returned function restores them."""
    matmul = _read(torch.get_float32_matmul_precision)
    legacy = {name: _read(getattr, _CUDNN, name) for name in _LEGACY_FLAGS}
    precisions = [backend.fp32_precision for backend in _FP32_PRECISION]

    def restore() -> None:
        with FAST_PATHS.allow_flag_changes():
            if matmul is not None:
                torch.set_float32_matmul_precision(matmul)
            for name, value in legacy.items():
                if value is not None:
                    setattr(_CUDNN, name, value)
            for backend, value in zip(_FP32_PRECISION, precisions, strict=True):
                backend.fp32_precision = value

    return restore


def with_cudnn(dtype: str, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Compute with the fastest of all cuDNN's algorithms, and with TF32 only if `dtype` is tf32."""
    with precision(dtype, algorithms=0):
        return compute()


def round_to_tf32(values: torch.Tensor) -> torch.Tensor:
    """Round to a 10-bit mantissa, nearest, as the tensor cores' conversion does; infinities and NaN pass through."""
    bits = values.view(torch.int32)
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values)


def tf32_allowed() -> bool:
    """Return True if PyTorch allows TF32 in both convolutions and matmuls."""
    if _FP32_PRECISION:
        return all(one.fp32_precision == "tf32" for one in (torch.backends.cuda.matmul, _CUDNN.conv))
    return bool(torch.backends.cuda.matmul.allow_tf32 and _CUDNN.allow_tf32)


def _read(getter: Callable[..., Any], *arguments: Any) -> Any:
    """Return None if PyTorch refuses to answer, as it does where the two TF32 APIs disagree."""
    try:
        return getter(*arguments)
    except RuntimeError:
        return None
