"""Processes that compile for a GPU: they stay between calls, and exit with their owner."""

from __future__ import annotations

import os
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import escalade
from escalade import subprocesses
from escalade.device import compilers
from escalade.device.nvrtc import is_compiled
from escalade.device.precompilation import precompile
from escalade.device.program import Program
from tests.bench.fake import SOURCE

LONGEST = 50
"""Seconds; shorter than the idle time of compilers without work, so that one that exits sooner exited for another
reason."""


@pytest.fixture(autouse=True)
def processes_of_the_test(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without compilers of another test, and with an empty cache."""
    monkeypatch.setenv("ESCALADE_CACHE_DIR", str(tmp_path / "cache"))
    compilers.stop()
    yield
    compilers.stop()


def programs(first: int = 0, count: int = 2) -> list[Program]:
    return [
        Program.of(SOURCE, "scale", {"FAULT": 0, "SLIP": 1.0 + number})
        for number in range(first, first + count)
    ]


def first_process() -> subprocess.Popen[bytes]:
    assert compilers._server.process is not None
    return compilers._server.process


def test_they_stay_for_the_next_programs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also, store the result in the folder that is the cache's at that time."""
    compilers.start()
    begun = first_process()
    assert precompile(programs(), "sm_90a", 2) == []
    monkeypatch.setenv("ESCALADE_CACHE_DIR", str(tmp_path / "another"))
    assert precompile(programs(), "sm_90a", 2) == []
    assert first_process() is begun
    for folder in ("cache", "another"):
        assert len(list((tmp_path / folder).rglob("*.bin"))) == 2


def test_programs_started_ahead_are_available_on_request() -> None:
    broken = Program.of(SOURCE, "scale", {"FAULT": 0})  # SLIP is undefined
    compilers.compile_ahead([*programs(), broken], "sm_90a", 2)
    begun, asked = first_process(), [*programs(), broken, *programs(2, 1)]
    said: dict[Program, str] = {}
    assert compilers.compile_all(asked, "sm_90a", 2, said.__setitem__) == []
    assert {*said} == {*asked} and [program for program, message in said.items() if message] == [broken]
    assert all(is_compiled(program, "sm_90a") for program in (*programs(), *programs(2, 1)))
    assert first_process() is begun


def test_nothing_is_begun_ahead_while_others_are_waited_for() -> None:
    with compilers._server.exclusive():
        compilers.compile_ahead(programs(), "sm_90a", 2)
    assert compilers._server.process is None


def test_waiting_requests_are_started_before_precompilation(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Program] = []

    def begun(job: compilers._CompileJob) -> int:
        order.append(job.program)
        reading, writing = os.pipe()
        with os.fdopen(writing, "wb") as file:
            pickle.dump(("", None), file)
        return reading

    monkeypatch.setattr(compilers, "_fork_worker", begun)
    copies, (a, b, c) = compilers._Workers(), programs(0, 3)
    for ahead in ((a, b), (b,)):
        copies.submit(compilers.CompileRequest(ahead, "sm_90a", 1, (), wait=False))
    copies.submit(compilers.CompileRequest((c, a, c), "sm_90a", 1, (), wait=True))
    answers: list[tuple[int, str, bytes | None]] = []
    while copies.running:
        copies.collect(next(iter(copies.running)))
        answers += copies.results()
    assert order == [a, c, b] and sorted(answers) == [(0, "", None), (1, "", None), (2, "", None)]


def test_those_that_have_ended_are_started_again() -> None:
    assert precompile(programs(), "sm_90a", 2) == []
    gone = first_process()
    subprocesses.kill(gone)
    gone.wait()
    assert precompile(programs(2), "sm_90a", 2) == []
    assert first_process() is not gone
    assert all(is_compiled(program, "sm_90a") for program in programs(count=4))


def test_leftovers_of_dead_workers_are_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def deaf(function: str, variables: dict[str, str]) -> subprocess.Popen[bytes]:
        asked.append(function)
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", ""], stdin=pipe, stdout=pipe, process_group=0)

    monkeypatch.setattr(subprocesses, "start_python", deaf)
    seen: list[Program] = []
    assert precompile(programs(), "sm_90a", 2, seen.append) == []
    assert asked and seen == programs()
    assert all(is_compiled(program, "sm_90a") for program in programs())


def test_where_none_can_be_started_programs_are_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: str, variables: dict[str, str]) -> subprocess.Popen[bytes]:
        raise PermissionError("no processes here")

    monkeypatch.setattr(subprocesses, "start_python", refuse)
    compilers.start()
    assert precompile(programs(), "sm_90a", 2) == []
    assert all(is_compiled(program, "sm_90a") for program in programs())


def test_they_exit_when_no_caller_waits() -> None:
    def interrupt(program: Program) -> None:
        raise KeyboardInterrupt

    compilers.start()
    begun = first_process()
    with pytest.raises(KeyboardInterrupt):
        precompile(programs(), "sm_90a", 2, interrupt)
    assert begun.poll() is not None
    assert precompile(programs(), "sm_90a", 2) == []


def run(script: str) -> str:
    """Output of a script. It ends when every process that can write to its stderr has exited."""
    quiet = "ignore::DeprecationWarning"  # os.fork warns of threads from Python 3.12 on
    done = subprocess.run(
        [sys.executable, "-W", quiet, "-c", script], capture_output=True, text=True, timeout=LONGEST
    )
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize("way", ["pass", "os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_they_end_with_the_process_that_began_them(way: str) -> None:
    run(f"import os, signal; from escalade.device import compilers; compilers.start(); {way}")


BEGINNING = f"""
import os, signal
from escalade.device import compilers
from escalade.device.program import Program

def programs(first):
    return [Program.of({SOURCE!r}, "scale", dict(FAULT=0, SLIP=1.0 + first + n)) for n in range(2)]

def are_compiled(first):
    said = []
    left = compilers.compile_all(programs(first), "sm_90a", 2, lambda program, message: said.append(message))
    return not left and said == ["", ""]
"""
FORKED = (
    BEGINNING
    + """
assert are_compiled(0)
begun = compilers._server.process
child = os.fork()
if child == 0:
    assert compilers._server.process is None
    assert are_compiled(2) and compilers._server.process is not begun
    compilers.stop()
    os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), begun.poll())
assert are_compiled(4) and compilers._server.process is begun
"""
)


def test_a_process_that_was_forked_has_its_own() -> None:
    assert run(FORKED).split() == ["3", "None"]


OUTLIVED = (
    BEGINNING
    + """
compilers.start()
if os.fork():
    os._exit(0)
os.close(1)
os.close(2)
compilers._server.inherited[0].stdout.read()  # until they have ended
"""
)


def test_they_do_not_wait_for_a_process_that_was_forked() -> None:
    run(OUTLIVED)


DYING = (
    BEGINNING
    + """
def compile_program(program, architecture):
    if program == programs(0)[0]:
        os.kill(os.getpid(), signal.SIGKILL)

compilers.compile_program, compilers.unpersisted_payload = compile_program, lambda program, architecture: None
copies = compilers._Workers()
copies.submit(compilers.CompileRequest(tuple(programs(0)), "sm_90a", 2, (), wait=True))
for pipe in [*copies.running]:
    copies.collect(pipe)
for number, message, payload in copies.results():
    print(number, message.split(" while ")[0])
"""
)


def test_one_that_dies_is_named_by_its_program_and_the_others_go_on() -> None:
    assert run(DYING).splitlines() == ["0 a compiler process died", "1 "]


IDLE = "from escalade.device import compilers; compilers.IDLE_SECONDS = 0.0; compilers.serve()"


def test_they_go_when_no_program_comes() -> None:
    with subprocess.Popen([sys.executable, "-c", IDLE], stdin=subprocess.PIPE) as process:
        assert process.wait(LONGEST) == 0


def test_an_engine_on_the_cpu_begins_none() -> None:
    escalade.compile(torch.nn.ReLU(), torch.ones(1, 4), device="cpu")
    assert compilers._server.process is None
