"""Counts of a launch: memory requests, operations per unit, barriers, copies.

docs/twin.md lists the Nsight Compute metric that corresponds to each count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace

SECTOR_BYTES = 32
OPERATIONS = ("fma", "add", "multiply", "special")
"""Operations counted per basic block, in the order of `assembly._UNITS`."""


@dataclass(frozen=True)
class Requests:
    """Warp-level memory requests of one kind, of one source line or summed over several."""

    memory: str
    """Address space: "global", "shared", or "cluster" (another CTA's shared memory)."""
    operation: str
    """"load", "store", "atomic", or "copy" (cp.async, which reads global memory and writes shared)."""
    requests: int = 0
    transactions: int = 0
    """32-byte sectors touched, or shared-memory wavefronts."""
    least: int = 0
    """Wavefronts without bank conflicts; for other memories, equal to `transactions`."""
    bytes: int = 0
    """Bytes requested by threads, with repetitions."""
    place: str = ""

    @property
    def per_request(self) -> float:
        return self.transactions / self.requests if self.requests else 0.0

    @property
    def conflicts(self) -> int:
        """Wavefronts beyond the minimum."""
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
        unit = "wavefronts" if self.memory == "shared" else "sectors"
        return (
            f"{self.place} {self.memory} {self.operation}: {self.requests} requests, "
            f"{self.per_request:.2f} {unit} each"
        )


@dataclass(frozen=True)
class Counts:
    """Counts of one launch, or the sum over several."""

    lines: tuple[Requests, ...] = field(default=(), repr=False)
    """Requests per source line."""
    unique_read_bytes: int = 0
    """Distinct bytes of global memory read, per launch."""
    unique_written_bytes: int = 0
    barriers: int = 0
    """Warp arrivals at CTA barriers, including named ones."""
    shuffles: int = 0
    """Shuffles per warp."""
    atomics: int = 0
    """Atomics per thread."""
    fma: int = 0
    """Fused multiply-adds per thread; like all arithmetic counts, outside the tensor cores."""
    add: int = 0
    multiply: int = 0
    special: int = 0
    """Divisions, roots, exponentials and similar: on a GPU, an approximation plus operations around it."""
    tensor_instructions: int = 0
    """Warp-level mma instructions; a wgmma counts once per warp."""
    tensor_multiplications: int = 0
    """Multiply-adds in the tensor cores."""
    bulk_loads: int = 0
    """Bulk tensor copies (TMA)."""
    bulk_stores: int = 0
    bulk_load_sectors: int = 0
    bulk_store_sectors: int = 0

    def of(self, memory: str, operation: str) -> Requests:
        """Sum the requests of a kind over all lines."""
        chosen = (line for line in self.lines if (line.memory, line.operation) == (memory, operation))
        return sum((replace(line, place="") for line in chosen), Requests(memory, operation))

    @property
    def read_bytes(self) -> int:
        """Bytes of all global-memory sectors requested, with repetitions, by loads, cp.async and TMA."""
        sectors = self.of("global", "load").transactions + self.of("global", "copy").transactions
        return SECTOR_BYTES * (sectors + self.bulk_load_sectors)

    @property
    def written_bytes(self) -> int:
        return SECTOR_BYTES * (self.of("global", "store").transactions + self.bulk_store_sectors)

    @property
    def conflicts(self) -> int:
        """Shared-memory wavefronts caused by bank conflicts."""
        return sum(line.conflicts for line in self.lines if line.memory == "shared")

    def __add__(self, other: Counts) -> Counts:
        numbers = {name: getattr(self, name) + getattr(other, name) for name in _NUMBERS}
        return Counts(_by_line([*self.lines, *other.lines]), **numbers)

    def figures(self) -> dict[str, int]:
        """Return all counts by name, without source lines."""
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
    """Parse the runtime's output (runtime/counting.cpp); `blocks` has the operations of each basic block."""
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
