"""Seeds, the cases of the day, the kernel cache, and skipped GPU tests."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import pathlib
import random
import signal
import threading
import zlib
from collections.abc import Generator
from typing import Any

import hypothesis
import pytest
import torch
import torch.fx.config

from escalade import subprocesses
from escalade.device.twin import building
from escalade.engine.passes import quantize
from escalade.errors import EscaladeError
from escalade.ops.choose.choice import estimated
from tests.support import Sample, of_the_day

ROOT = pathlib.Path(__file__).parent.parent

# In the repository, so that a second run is fast and the user's own cache is untouched.
os.environ.setdefault("ESCALADE_CACHE_DIR", str(ROOT / ".cache" / "escalade"))

hypothesis.settings.register_profile("default", max_examples=20, deadline=None, print_blob=True)
hypothesis.settings.register_profile("thorough", max_examples=500, deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "repeated", max_examples=20, deadline=None, print_blob=True, derandomize=True
)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="repeat a run's random inputs")
    parser.addoption(
        "--sample",
        type=datetime.date.fromisoformat,
        metavar="DATE",
        help="run the cases of that day (today): they rotate, and a week runs all of them",
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="every rung on every small problem in every dtype and layout, and more examples; takes long",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with Ctrl-C ignored, and the processes that tests start would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.seed is not None:
        hypothesis.settings.load_profile("repeated")
    first = getattr(config, "workerinput", {})
    given = first.get("seed", config.option.seed)
    config.option.seed = random.SystemRandom().randrange(2**31) if given is None else given
    if "sample" in first:
        config.option.sample = datetime.date.fromisoformat(first["sample"])
    config.option.sample = config.option.sample or datetime.datetime.now(datetime.UTC).date()
    if config.option.thorough:
        hypothesis.settings.load_profile("thorough")
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    # Stack traces of graph nodes: a tenth of the time of a capture, and no test reads them.
    torch.fx.config.do_not_emit_stack_traces = True


def pytest_sessionstart(session: pytest.Session) -> None:
    """Build the twin's runtime while pytest-xdist workers collect tests: the first test would wait for it."""
    if _has_workers(session.config):
        threading.Thread(target=_build_runtime, daemon=True).start()


def _build_runtime() -> None:
    with contextlib.suppress(EscaladeError, OSError):  # the tests that need it report the error
        building.runtime_library()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _has_workers(session.config):
        subprocesses.kill_all()  # g++ is missing, and no test needed the runtime


def _has_workers(config: pytest.Config) -> bool:
    """Return True if this process is the pytest-xdist controller."""
    return bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All pytest-xdist workers share the controller's seed and date."""
    node.workerinput["seed"] = node.config.option.seed
    node.workerinput["sample"] = node.config.option.sample.isoformat()


def pytest_report_header(config: pytest.Config) -> str:
    return f"repeat these cases with these inputs: {_repeated(config)}"


def _repeated(config: pytest.Config) -> str:
    return f"--seed {config.option.seed} --sample {config.option.sample}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out(config, items)
    if torch.cuda.is_available():
        return
    reason = "needs a CUDA device; " + (
        "PyTorch finds none" if torch.version.cuda else "this PyTorch is built without CUDA"
    )
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases of tests with a `share` that are due on other days."""
    if config.option.thorough:
        return
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("share")
        if mark:
            cases.setdefault((item.nodeid.split("[")[0], *mark.args), []).append(item)
    due = {
        item
        for (test, share), offered in cases.items()
        for item in of_the_day(offered, share, config.option.sample, test)
    }
    left = {item for offered in cases.values() for item in offered} - due
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Collect garbage rarely: a full collection over modules and tests takes a third of a second, dozens of times per
    run, and graphs of PyTorch's pass the default threshold at once."""
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("seed", f"repeat with: pytest {_repeated(item.config)} '{item.nodeid}'"))
    return report


@pytest.fixture(autouse=True)
def _own_estimates(request: pytest.FixtureRequest) -> Generator[None]:
    """Clear the cache of estimated choices around a test that may patch what they depend on."""
    patches = "monkeypatch" in request.fixturenames
    if patches:
        estimated.cache_clear()
    yield
    if patches:
        estimated.cache_clear()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Different in every test and every run."""
    return zlib.crc32(f"{request.config.option.seed} {request.node.nodeid}".encode())


@pytest.fixture
def sample(request: pytest.FixtureRequest) -> Sample:
    first = zlib.crc32(request.node.nodeid.encode())
    return Sample(first + request.config.option.sample.toordinal(), request.config.option.thorough)


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def all_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantize every layer that kernels support, also where 16 bits are faster: the networks of tests are small."""
    monkeypatch.setattr(quantize, "fastest_layers", lambda *given: {*given[4]})
