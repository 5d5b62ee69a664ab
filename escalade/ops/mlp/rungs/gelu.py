"""Forms of GELU that a config can select, and their constants."""

from __future__ import annotations

from escalade.device.program import Constant, Macro

_FORMS = {
    "erf": ("gelu_erf", "gelu_tanh"),
    "fine": ("gelu_fine", "gelu_tanh_by_exp2"),
    "fitted": ("gelu_fitted", "gelu_tanh_by_exp2"),
    "tanh": ("gelu_tanh_approximate", "gelu_tanh_approximate"),
}
"""Functions of kernels/common/gelu.cuh for `gelu`, and for `gelu_tanh`."""


def gelu_constants(form: str) -> dict[str, Constant]:
    """Return the constants of kernels/mlp/activation.cuh."""
    gelu, gelu_tanh = _FORMS[form]
    return {"GELU": Macro(gelu), "GELU_TANH": Macro(gelu_tanh)}


def gelu_forms(dtype: str) -> tuple[str, ...]:
    """Return the forms whose error is below the rounding of the dtype (5e-6 fitted, 5e-4 by tanh), best first."""
    return {"fp32": ("fine", "erf"), "fp16": ("fitted", "erf"), "bf16": ("fitted", "erf", "tanh")}[dtype]
