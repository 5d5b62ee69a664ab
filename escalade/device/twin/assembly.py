"""Edits of a kernel's assembly that C++ cannot express.

`__shared__` variables are thread-local variables to g++. Each static one is followed by a gap, so that an overrun hits
nothing in use. The undefined symbols of `extern __shared__ T name[]` become weak, so that the library loads without
them; the runtime recognizes the dynamic array by that.

C library functions that end the process or store through a pointer are replaced by the runtime's versions
(runtime/library.cpp), which report to the checks. Counted kernels get a table of the arithmetic in each basic block.
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
_BLOCK = re.compile(r"^\s+(?:bl|call)\s+__sanitizer_cov_trace_pc\b")
_END_OF_FUNCTION = ".cfi_endproc"
BLOCKS = "twin_blocks"
_UNITS = (
    re.compile(r"^\s+(?:fn?m(?:add|sub)|vfn?m(?:add|sub)\d+s[hsd])\b"),
    re.compile(r"^\s+(?:f(?:add|sub)\s+[sdh]|v?(?:add|sub)s[hsd]\b)"),
    re.compile(r"^\s+(?:fn?mul\s+[sdh]|v?muls[hsd]\b)"),
    re.compile(
        r"^\s+(?:fdiv\s+[sdh]|fsqrt\s+[sdh]|v?(?:div|sqrt)s[hsd]\b"
        r"|(?:bl|call)\s+\*?(?:exp|exp2|exp10|expm1|log|log2|log10|log1p|sin|cos|tan|tanh|pow|erf|erfc|sincos|sqrt)f?\b)"
    ),
)
"""Instructions by GPU unit: fused multiply-adds, additions, multiplications, special functions."""
FILLS = "twin_fills"
_FILL_BYTES = {"-16843010": 4, "-72340172838076674": 8}
"""Pattern of -ftrivial-auto-var-init=pattern (0xFE in each byte), as it appears in assembly."""
_FILL = re.compile(
    rf"^\s+(?:movabsq|movl)\s+\$({'|'.join(_FILL_BYTES)}), |^\s+movw\s+\$(-258), -?\d*\(%r[bs]p\)"
)
_FILL_CONSTANT = re.compile(rf"^\s+\.(?:long|quad)\s+({'|'.join(_FILL_BYTES)})$")
_MEMSET_BYTE = re.compile(r"^\s+movl\s+\$254, %esi$")
_SPREAD = re.compile(r"^(\s+vpbroadcastb\s+)%(\w+)(, %\w+)$")
_MOVED = re.compile(r"^\s+vmovd\s+%(\w+), %(\w+)$")
_BYTE = ".Ltwin_byte"
_WGMMA = ("11wgmma_issue", "20wgmma_from_registers")
_WAITING = "N4twin4wait"  # namespace twin::wait, mangled


def prepare(assembly: str, checks: bool = False) -> str:
    names = "|".join((*_ENDING, *_STORING) if checks else _ENDING)
    assembly = re.sub(
        rf"^(\s+(?:bl|b|call|jmp)\s+\*?)({names})\b", r"\1twin_\2", assembly, flags=re.MULTILINE
    )
    weak = (f"\t.weak\t{name}\n" for name in sorted(_undefined(assembly)))
    return "".join([_with_gaps(assembly) if _SHARED in assembly else assembly, "\n", *weak])


def add_block_table(assembly: str) -> str:
    """Append a table of basic blocks: start address and number of instructions per unit of `_UNITS`.

    Blocks without any are omitted.
    """
    lines: list[str] = []
    found: list[list[int]] = []
    inside = False
    for line in assembly.splitlines():
        lines.append(line)
        if _BLOCK.match(line):
            lines.append(f".Ltwin_block_{len(found)}:")
            found.append([0] * len(_UNITS))
            inside = True
        elif _END_OF_FUNCTION in line:
            inside = False
        elif inside:
            for unit, pattern in enumerate(_UNITS):
                found[-1][unit] += bool(pattern.match(line))
    rows = [
        f"\t.quad\t.Ltwin_block_{number}, {', '.join(map(str, counts))}"
        for number, counts in enumerate(found)
        if any(counts)
    ]
    head = ["\t.data", "\t.balign\t8", f"\t.globl\t{BLOCKS}", f"\t.type\t{BLOCKS}, %object", f"{BLOCKS}:"]
    return "\n".join([*lines, *head, *rows, f"\t.size\t{BLOCKS}, .-{BLOCKS}", ""])


def add_fill_table(assembly: str) -> str:
    """Append a table of the bytes, in code and constants, that fill uninitialized variables.

    For x86-64 only, where an immediate operand is the end of its instruction.
    """
    lines: list[str] = []
    rows = [f"\t.quad\t{_BYTE}, 1"]
    given = assembly.splitlines()
    for at, line in enumerate(given):
        label = f".Ltwin_fill_{len(rows)}"
        if constant := _FILL_CONSTANT.match(line):
            lines += [f"{label}:", line]
            rows.append(f"\t.quad\t{label}, {_FILL_BYTES[constant[1]]}")
        elif fill := _FILL.match(line):
            size = _FILL_BYTES[fill[1]] if fill[1] else 2
            lines += [line, f"{label}:"]
            rows.append(f"\t.quad\t{label} - {size}, {size}")
        elif _MEMSET_BYTE.match(line) and any("memset" in near for near in given[at : at + 8]):
            lines += [line, f"{label}:"]
            rows.append(f"\t.quad\t{label} - 4, 1")
        elif (spread := _SPREAD.match(line)) and _holds_fill(spread[2], given[max(0, at - 64) : at]):
            lines.append(f"{spread[1]}{_BYTE}(%rip){spread[3]}")
        else:
            lines.append(line)
    byte = ["\t.section\t.rodata", f"{_BYTE}:", "\t.byte\t-2"]
    head = ["\t.data", "\t.balign\t8", f"\t.globl\t{FILLS}", f"\t.type\t{FILLS}, %object", f"{FILLS}:"]
    return "\n".join([*lines, *byte, *head, *rows, f"\t.size\t{FILLS}, .-{FILLS}", ""])


def _holds_fill(register: str, before: list[str]) -> bool:
    """Return True if the register was last set to the byte of a fill."""
    for line in reversed(before):
        if line.endswith(f", %{register}"):
            if moved := _MOVED.match(line):
                register = moved[1]
                continue
            return bool(re.match(r"\s+movl\s+\$-2, ", line))
    return False


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


def has_barriers(assembly: str) -> bool:
    """Return True if the kernel calls a barrier or a collective; otherwise it needs no fibers."""
    return _WAITING in assembly


def has_descriptors(assembly: str) -> bool:
    """Return True if the kernel contains a wgmma, which reads shared memory by descriptors."""
    return any(name in assembly for name in _WGMMA)


def _undefined(assembly: str) -> set[str]:
    lines = [line for line in assembly.splitlines() if "tlsgd" in line.lower()]
    used = {first or second for first, second in _THREAD_LOCAL.findall("\n".join(lines))}
    return {name for name in used if f"\n{name}:" not in assembly}
