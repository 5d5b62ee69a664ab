"""Small changes to a kernel's assembly: for its shared memory, and for what it calls of the host's libraries.

`__shared__` variables are thread-local ones to g++. Two things are done that C++ cannot say: a gap goes
behind each static variable, so that an overrun hits nothing that is in use; and the undefined symbols of
`extern __shared__ T name[]` become weak, so that the library loads without them (the runtime knows the
dynamic array by that).

A function of the C library that ends the process, or stores through a pointer, is replaced by the runtime's of that
name (runtime/library.cpp), which reports or tells the checks.
"""

from __future__ import annotations

import re

GAP_BYTES = 256
_SECTION = re.compile(r"^\s*\.(section|text|data|bss)\b\s*(\S*)")
_SHARED = ".tbss"
_SPACE = re.compile(r"^\s*\.zero\s+\d+")
_THREAD_LOCAL = re.compile(r":tlsgd:([\w.$]+)|([\w.$]+)@tlsgd", re.IGNORECASE)
_ENDING = ("abort", "__assert_fail")
_STORING = (
    *("memcpy", "memmove", "memset"),
    *(name + suffix for name in ("frexp", "modf", "remquo", "sincos") for suffix in ("", "f")),
)
_WAITING = "N4twin4wait"  # namespace twin::wait, mangled


def prepare(assembly: str, checks: bool = False) -> str:
    names = "|".join((*_ENDING, *_STORING) if checks else _ENDING)
    assembly = re.sub(
        rf"^(\s+(?:bl|b|call|jmp)\s+\*?)({names})\b", r"\1twin_\2", assembly, flags=re.MULTILINE
    )
    weak = (f"\t.weak\t{name}\n" for name in sorted(_undefined(assembly)))
    return "".join([_with_gaps(assembly) if _SHARED in assembly else assembly, "\n", *weak])


def _with_gaps(assembly: str) -> str:
    lines = []
    in_thread_local = False
    for line in assembly.splitlines():
        section = _SECTION.match(line)
        if section:
            in_thread_local = section[1] == "section" and section[2].startswith(_SHARED)
        lines.append(line)
        if in_thread_local and _SPACE.match(line):
            lines.append(f"\t.zero\t{GAP_BYTES}")
    return "\n".join(lines)


def can_wait(assembly: str) -> bool:
    """Whether the kernel names a barrier or a collective; if not, it needs no fibers."""
    return _WAITING in assembly


def _undefined(assembly: str) -> set[str]:
    lines = [line for line in assembly.splitlines() if "tlsgd" in line.lower()]
    used = {first or second for first, second in _THREAD_LOCAL.findall("\n".join(lines))}
    return {name for name in used if f"\n{name}:" not in assembly}
