"""Kernel sources with their compile-time constants.

A `.cu` file under `escalade/kernels` is plain CUDA C++. The parameters that it declares (`TILE_ROWS`, `Element`, …; see
`escalade/device/sources.py`) are defined by a prelude generated for a problem and a config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from escalade.device.sources import (
    GUARD,
    Constant,
    Macro,
    Type,
    declares_parameters,
    included,
    parameters,
    read,
)


@dataclass(frozen=True)
class Program:
    """Unit of compilation: a source, one entry point and its constants.

    The source path is relative to `escalade/kernels`, or absolute for your own kernels. Both may include the headers
    of `escalade/kernels`.
    """

    source: str
    entry: str
    constants: tuple[tuple[str, Constant], ...] = ()

    @staticmethod
    def of(
        source: str, entry: str = "", constants: Mapping[str, Constant] | None = None, **scope: Any
    ) -> Program:
        """Return a program whose parameters are evaluated over `scope`, as the source declares them.

        `constants` are further ones, or take the place of declared ones. The entry is named as the path is:
        `conv2d_direct` of `conv2d/direct.cu`.
        """
        values = parameters(source, scope, constants or {}) if scope else constants or {}
        return Program(
            source, entry or source.removesuffix(".cu").replace("/", "_"), tuple(sorted(values.items()))
        )

    def text(self) -> str:
        """Return prelude and source; a `#line` directive keeps the source's line numbers."""
        guard = f"#define {GUARD}\n" if declares_parameters(self.source) else ""
        return f'{guard}{prelude(self.constants)}#line 1 "{self.source}"\n{read(self.source)}'

    def headers(self) -> tuple[str, ...]:
        """List the headers of `escalade/kernels` that the source includes, directly or indirectly."""
        return included(self.source)

    def __str__(self) -> str:
        chosen = ", ".join(f"{name}={_spell(value)}" for name, value in self.constants)
        return f"{self.entry} of {self.source} ({chosen})"


def prelude(constants: tuple[tuple[str, Constant], ...]) -> str:
    """Return the constants as C++ definitions, with the headers that define their types."""
    lines = []
    types = {value.name for _, value in constants if isinstance(value, Type)}
    if any(name.startswith("__half") for name in types):
        lines.append("#include <cuda_fp16.h>")
    if any(name.startswith("__nv_bfloat16") for name in types):
        lines.append("#include <cuda_bf16.h>")
    if "e4m3" in types:
        lines.append("struct e4m3;  // common/e4m3.cuh")
    if "s8" in types:
        lines.append("struct s8;  // common/s8.cuh")
    for name, value in constants:
        match value:
            case Type():
                lines.append(f"using {name} = {value.name};")
            case Macro():
                lines.append(f"#define {name} {value.text}".rstrip())
            case bool():
                lines.append(f"constexpr bool {name} = {str(value).lower()};")
            case int():
                lines.append(f"constexpr {'int' if abs(value) < 2**31 else 'long long'} {name} = {value};")
            case float():
                lines.append(f"constexpr float {name} = {value!r}f;")
    return "".join(f"{line}\n" for line in lines)


def _spell(value: Constant) -> str:
    match value:
        case Type(name):
            return name
        case Macro(text):
            return text or "(nothing)"
        case bool():
            return str(value).lower()
        case _:
            return str(value)
