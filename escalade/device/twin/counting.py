"""What a launch was counted by: memory requests, operations of each unit, barriers, copies.

docs/twin.md has the metric of NVIDIA's profiler that each count stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace

SECTOR_BYTES = 32
OPERATIONS = ("fma", "add", "multiply", "special")
"""What blocks of code are searched for, in the order of `assembly`'s table."""


@dataclass(frozen=True)
class Requests:
    """Requests of warps of one kind, those of one place in the source or of several."""

    memory: str
    """The memory that is accessed: "global", "shared", or "cluster", another block's shared memory."""
    operation: str
    """One of "load", "store", "atomic", and "copy" for cp.async, which reads global memory and writes shared."""
    requests: int = 0
    transactions: int = 0
    """Sectors of 32 bytes that were touched, or turns that the banks of shared memory took."""
    least: int = 0
    """Turns without a conflict; of other memories as many as there were transactions."""
    bytes: int = 0
    """The bytes that threads asked for, as often as they did."""
    place: str = ""

    @property
    def per_request(self) -> float:
        return self.transactions / self.requests if self.requests else 0.0

    @property
    def conflicts(self) -> int:
        """Turns beyond the least."""
        return self.transactions - self.least

    def __add__(self, other: Requests) -> Requests:
        return Requests(
            self.memory,
            self.operation,
            self.requests + other.requests,
            self.transactions + other.transactions,
            self.least + other.least,
            self.bytes + other.bytes,
            self.place if self.place == other.place else "",
        )

    def __str__(self) -> str:
        unit = "turns of the banks" if self.memory == "shared" else "sectors"
        return (
            f"{self.place} {self.memory} {self.operation}: {self.requests} requests, "
            f"{self.per_request:.2f} {unit} each"
        )


@dataclass(frozen=True)
class Counts:
    """The counts of one launch, or of several together."""

    lines: tuple[Requests, ...] = field(default=(), repr=False)
    """Every source line's requests."""
    unique_read_bytes: int = 0
    """Bytes of global memory that somebody read, each once; in several launches once in each."""
    unique_written_bytes: int = 0
    barriers: int = 0
    """Warps that came to a barrier of their block, a named one too."""
    shuffles: int = 0
    """Shuffles of warps."""
    atomics: int = 0
    """Atomics of threads."""
    fma: int = 0
    """Fused multiply-adds of threads, as all arithmetic outside the tensor cores is counted."""
    add: int = 0
    multiply: int = 0
    special: int = 0
    """Divisions, roots, exponentials and their like: on the card each is an approximation and operations around it."""
    tensor_instructions: int = 0
    """An mma of a warp, or its part of a wgmma."""
    tensor_multiplications: int = 0
    """Multiply-adds in the tensor cores."""
    bulk_loads: int = 0
    """Bulk tensor copies (TMA)."""
    bulk_stores: int = 0
    bulk_load_sectors: int = 0
    bulk_store_sectors: int = 0

    def of(self, memory: str, operation: str) -> Requests:
        """All requests of a kind."""
        chosen = (line for line in self.lines if (line.memory, line.operation) == (memory, operation))
        return sum((replace(line, place="") for line in chosen), Requests(memory, operation))

    @property
    def read_bytes(self) -> int:
        """Bytes of all sectors that were asked of global memory, as often as they were, by whichever way."""
        sectors = self.of("global", "load").transactions + self.of("global", "copy").transactions
        return SECTOR_BYTES * (sectors + self.bulk_load_sectors)

    @property
    def written_bytes(self) -> int:
        return SECTOR_BYTES * (self.of("global", "store").transactions + self.bulk_store_sectors)

    @property
    def conflicts(self) -> int:
        """Turns of shared memory's banks that other places for the same bytes would have saved."""
        return sum(line.conflicts for line in self.lines if line.memory == "shared")

    def __add__(self, other: Counts) -> Counts:
        numbers = {name: getattr(self, name) + getattr(other, name) for name in _NUMBERS}
        return Counts(_by_line([*self.lines, *other.lines]), **numbers)

    def figures(self) -> dict[str, int]:
        """Every count by a name of its own, without the lines."""
        found = {"read_bytes": self.read_bytes, "written_bytes": self.written_bytes}
        found |= {name: getattr(self, name) for name in _NUMBERS}
        for memory, operation in sorted({(line.memory, line.operation) for line in self.lines}):
            total = asdict(self.of(memory, operation))
            unit = "turns" if memory == "shared" else "sectors"
            found |= {
                f"{memory}_{operation}_requests": total["requests"],
                f"{memory}_{operation}_{unit}": total["transactions"],
                f"{memory}_{operation}_bytes": total["bytes"],
            }
            if memory == "shared":
                found[f"{memory}_{operation}_conflicts"] = total["transactions"] - total["least"]
        return found


_NUMBERS = tuple(each.name for each in fields(Counts) if each.name != "lines")


def parse(text: str, blocks: Mapping[int, tuple[int, ...]]) -> Counts:
    """What the runtime wrote (runtime/counting.cpp); `blocks` has the operations of each block of code."""
    lines: list[Requests] = []
    numbers: dict[str, int] = dict.fromkeys(_NUMBERS, 0)
    for line in text.splitlines():
        match line.split("\t"):
            case ["request", _, "block", "barrier", requests, *_]:
                numbers["barriers"] += int(requests)
            case ["request", place, memory, operation, *numerals]:
                asked, transactions, least, size = map(int, numerals)
                lines.append(Requests(memory, operation, asked, transactions, least, size, place))
            case ["code", site, threads]:
                for name, count in zip(OPERATIONS, blocks.get(int(site), ()), strict=False):
                    numbers[name] += count * int(threads)
            case ["total", name, count]:
                numbers[name] += int(count)
    return Counts(_by_line(lines), **numbers)


def _by_line(requests: Iterable[Requests]) -> tuple[Requests, ...]:
    totals: dict[tuple[str, str, str], Requests] = {}
    for each in requests:
        key = (each.place, each.memory, each.operation)
        totals[key] = totals[key] + each if key in totals else each
    return tuple(totals[key] for key in sorted(totals))
