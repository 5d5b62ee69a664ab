"""Tables and provenance as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from escalade.measure.records import Record

CAMPAIGN = "escalade measure"
"""The command that repeats everything."""
_MOST_COMMANDS = 20


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """The first `left` columns are text, the others figures; one without any figure is left out."""
    found = list(rows)
    kept = [n for n in range(len(header)) if n < left or not found or any(row[n] for row in found)]
    rules = ["---" if n < left else "---:" for n in kept]
    lines = [[header[n] for n in kept], rules, *([row[n] for n in kept] for row in found)]
    return "".join("| " + " | ".join(_cell(cell) for cell in line) + " |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def origin(records: Sequence[Record]) -> str:
    """Drivers, versions, commits, days and commands of all records, each once."""
    drivers = ", ".join(sorted({record.driver for record in records}))
    versions = sorted({", ".join(f"{name} {value}" for name, value in r.versions.items()) for r in records})
    commits = ", ".join(sorted({record.commit for record in records}))
    days = sorted({record.date[:10] for record in records})
    distinct = sorted({record.command for record in records})
    commands = "".join(f"- `{command}`\n" for command in distinct)
    if len(distinct) > _MOST_COMMANDS:
        commands = f"- `{CAMPAIGN}`, and each record by the command that it holds\n"
    return (
        f"Driver {drivers}; {'; '.join(versions)}; commit {commits}; {' to '.join(dict.fromkeys((days[0], days[-1])))}."
        f" Repeated by:\n\n{commands}"
    )
