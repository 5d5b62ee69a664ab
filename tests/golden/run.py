"""`python -m tests.golden write FOLDER`, then `check FOLDER`: check that a refactoring does not change results.

No GPU is needed; the target is an H200: launches and programs of all ladders (`kernels`), plans of networks and
training steps (`plans`; the rest of torchvision's networks: `torchvision`), problem names (`problems`) and the public
interface (`interface`). `check` prints differences and exits with 1. A kernel whose text differs is compiled in both
versions; only machine code counts.

Intended renames: `--rename places=indices` for a word, `--rename 'nodes[.](\\w+)=ops.\\1'` for an expression.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from typing import Any

import torch

from tests.golden import kernels, names, plans
from tests.golden.sources import flattened
from tests.golden.store import Line, Report, compare, read_lines, write_lines

PARTS: dict[str, tuple[Callable[[], list[str]], Callable[..., Any]]] = {
    "interface": (names.interface_tasks, names.interface),
    "problems": (names.problem_tasks, names.problems),
    "kernels": (kernels.tasks, kernels.collect),
    "plans": (plans.tasks, plans.collect),
    "torchvision": (plans.further_tasks, plans.collect),
}
COMPILED = 6
"""Programs of a changed source that `check` compiles, unless all are requested."""
_CACHE = "ESCALADE_CACHE_DIR"


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parsed(arguments)
    folder: pathlib.Path = asked.folder
    if asked.command == "write":
        folder.mkdir(parents=True, exist_ok=True)
    elif not folder.is_dir():
        raise SystemExit(
            f"{folder} is no golden set; make one of the state before: python -m tests.golden write"
        )
    failed = False
    for part in asked.only or PARTS:
        began = time.monotonic()
        if asked.command == "write":
            counted = _write(part, folder, asked.jobs)
        else:
            report = _check(part, folder, asked)
            failed |= bool(report.differences)
            counted = _shown(part, report, asked.show)
        print(f"{part}: {counted} ({time.monotonic() - began:.0f} s)", flush=True)
    return 1 if failed else 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=("write", "check"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", action="append", choices=tuple(PARTS), help="one part; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--show", type=int, default=20, help="differences to print per part")
    parser.add_argument(
        "--match", default="", help="check only tasks that this expression finds: resnet18|conv2d/"
    )
    parser.add_argument(
        "--rename", action="append", default=[], metavar="OLD=NEW", help="an intended renaming"
    )
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="FIELD", help="a field not to compare"
    )
    parser.add_argument("--thorough", action="store_true", help="compile all programs whose text differs")
    asked = parser.parse_args(arguments)
    if asked.command == "write" and asked.match:
        parser.error("--match is for check: a set is written whole")
    if any("=" not in one for one in asked.rename):
        parser.error("--rename takes OLD=NEW")
    return asked


def _write(part: str, folder: pathlib.Path, jobs: int) -> str:
    unfinished = folder / f"{part}-{_state()}.unfinished"
    lines, programs = _collected(part, PARTS[part][0](), {}, jobs, unfinished)
    if part == "kernels":
        kernels.save_programs(folder, programs)
    write_lines(folder / f"{part}.jsonl.gz", lines)
    unfinished.unlink()
    return f"{len(lines)} lines" + (f", {len(programs)} programs" if programs else "")


def _check(part: str, folder: pathlib.Path, asked: argparse.Namespace) -> Report:
    renames = dict(one.split("=", 1) for one in asked.rename)
    match = re.compile(asked.match)
    old = [
        line
        for line in read_lines(folder / f"{part}.jsonl.gz", renames)
        if line["task"] == "compiler" or match.search(line["task"])
    ]
    known: dict[str, list[str]] = {}
    for line in old:
        known.setdefault(line["task"], []).append(line["key"])
    wanted = [task for task in PARTS[part][0]() if match.search(task)]
    new, programs = _collected(part, wanted, known, asked.jobs)
    new = json.loads(json.dumps(new))  # as it would be read back: lists for tuples
    ignored = {*asked.ignore, *(("programs",) if part == "kernels" else ())}
    report = compare(old, new, ignored, additions_differ=part in ("plans", "torchvision"))
    if part == "kernels":
        report.merge(_machine_code(folder, asked, old, new, programs))
    return report


def _state() -> str:
    """Return a digest of all sources: results of an interrupted run are valid for the same sources only."""
    found = hashlib.sha256()
    for path in sorted(names.ROOT.glob("escalade*/**/*")) + sorted(
        pathlib.Path(__file__).parent.glob("*.py")
    ):
        if path.suffix in (".py", ".cu", ".cuh", ".json"):
            found.update(str(path.relative_to(names.ROOT)).encode() + path.read_bytes())
    return found.hexdigest()[:12]


def _collected(
    part: str,
    tasks: Sequence[str],
    known: dict[str, list[str]],
    jobs: int,
    unfinished: pathlib.Path | None = None,
) -> tuple[list[Line], dict[str, dict[str, Any]]]:
    """Run the tasks of a part in processes, with an empty cache: this user's measured choices must not count.

    With a file for finished tasks, an interrupted run continues from there.
    """
    found: dict[str, Any] = {}
    if unfinished and unfinished.exists():
        found = dict(map(json.loads, unfinished.read_text().splitlines()))
        _progress(f"{part}: {len(found)} of {len(tasks)} tasks are there from an interrupted run")
    with tempfile.TemporaryDirectory() as cache, _pool(jobs, cache) as pool, ExitStack() as stack:
        file = stack.enter_context(unfinished.open("a")) if unfinished else None
        running = {
            pool.submit(_timed, part, task, known.get(task, [])): task for task in tasks if task not in found
        }
        for one in as_completed(running):
            task = running[one]
            found[task], seconds = one.result()
            _progress(f"{part} {len(found)}/{len(tasks)}: {task}, {seconds:.1f} s")
            if file:
                file.write(json.dumps([task, found[task]]) + "\n")
                file.flush()
    programs: dict[str, dict[str, Any]] = {}
    if part == "kernels":
        for task, (made, further) in found.items():
            programs |= further
            found[task] = made
    lines = [line for task in tasks for line in found[task]]
    return [*lines, kernels.options()] if part == "kernels" else lines, programs


def _timed(part: str, task: str, known: Sequence[str]) -> tuple[Any, float]:
    began = time.process_time()
    return PARTS[part][1](task, known), time.process_time() - began


def _machine_code(
    folder: pathlib.Path, asked: argparse.Namespace, old: list[Line], new: list[Line], today: dict[str, Any]
) -> Report:
    then, texts = kernels.load(folder / kernels.PROGRAMS), kernels.load(folder / kernels.SOURCES)
    texts |= {one["text"]: flattened(one["source"]) for one in today.values() if one["text"] not in texts}
    scratch = folder / "sources"
    scratch.mkdir(exist_ok=True)

    def compiled(pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
        with _pool(asked.jobs, os.environ.get(_CACHE)) as pool:
            running = [
                pool.submit(
                    kernels.reason_to_differ, str(scratch), then[one], today[other], texts[then[one]["text"]],
                    texts[today[other]["text"]],
                )
                for one, other in pairs
            ]  # fmt: skip
            for number, each in enumerate(running, 1):
                _progress(f"kernels: compiling {number}/{len(pairs)} programs as they were and are")
                yield each.result()

    most = None if asked.thorough else COMPILED
    return kernels.compare_programs(old, new, then, today, most, compiled)


def _pool(jobs: int, cache: str | None) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin, (cache,))


def _begin(cache: str | None) -> None:
    torch.set_num_threads(1)
    if cache is not None:
        os.environ[_CACHE] = cache


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _shown(part: str, report: Report, most: int) -> str:
    for kind, entries in (("", report.differences), ("note: ", report.notes)):
        for entry in entries[:most]:
            print(f"{part}: {kind}{entry}")
        if len(entries) > most:
            print(f"{part}: {kind}… and {len(entries) - most} more (--show)")
    return f"{report.compared} compared, {len(report.differences)} differ, {len(report.notes)} notes"
