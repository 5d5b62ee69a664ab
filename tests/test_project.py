"""Project files agree with each other: workflows, versions, links to the repository, the site's pages."""

from __future__ import annotations

import pathlib
import re
import runpy
import subprocess
import tomllib
from typing import Any

import pytest
import yaml

import escalade.ops
from escalade.device.architecture import ARCHITECTURES
from escalade.version import URL, VERSION

ROOT = pathlib.Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


class _Loader(yaml.SafeLoader):
    """Loads mkdocs.yml, which names Python objects, without creating them."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def read(path: str) -> Any:
    return yaml.load((ROOT / path).read_text(), _Loader)


def pages_of(nav: Any) -> list[str]:
    """Return the paths in mkdocs.yml's tree of titles."""
    if isinstance(nav, str):
        return [nav]
    return [page for each in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(each)]


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.name
)
def test_workflows_call_targets_that_exist(path: pathlib.Path) -> None:
    jobs = read(str(path))["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    called = [target for run in runs for target in re.findall(r"\bmake ([a-z-]+)", run)]
    assert called and set(called) <= TARGETS
    assert all(job.get("timeout-minutes") for job in jobs.values())


def test_workflows_and_classifiers_name_the_same_pythons() -> None:
    matrix = read(".github/workflows/ci.yml")["jobs"]["tests"]["strategy"]["matrix"]
    classified = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if ":: Python :: 3." in each}
    assert set(matrix["python"]) == classified
    assert not classified & {each["python"] for each in matrix["include"]}
    oldest = min(classified, key=lambda version: int(version.partition(".")[2]))
    assert PROJECT["requires-python"] == f">={oldest}"


def test_every_file_gives_the_same_version() -> None:
    citation = read("CITATION.cff")
    releases = re.findall(r"^## \[(\d\S*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert (citation["version"], str(citation["date-released"])) == releases[0]
    assert releases[0][0] == VERSION
    assert citation["repository-code"] == URL == read("mkdocs.yml")["repo_url"]
    assert all(address.startswith(URL) for address in PROJECT["urls"].values())
    assert f"version {VERSION};" in (ROOT / "README.md").read_text()


def test_pre_commit_has_the_pinned_ruff() -> None:
    (ruff,) = (repo for repo in read(".pre-commit-config.yaml")["repos"] if "ruff" in repo["repo"])
    assert f"\nruff=={ruff['rev'].removeprefix('v')}\n" in (ROOT / "constraints.txt").read_text()


def test_the_image_runs_a_target_as_an_ordinary_user() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    (base,) = (line.split()[1] for line in lines if line.startswith("FROM "))
    assert "." not in base.partition("/")[0], "the default registry, whatever it is"
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users and users[-1] not in ("root", "0")
    (command,) = (line for line in lines if line.startswith("CMD "))
    assert re.findall(r"\w+", command)[-1] in TARGETS


def test_templates_of_issues_ask_for_something() -> None:
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = read(str(path))
        asked = form.get("body", form.get("contact_links"))
        assert asked and all(one.get("attributes", one) for one in asked), path.name


def test_the_site_has_every_page_once() -> None:
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    ladders = {page for page in pages if page.startswith("ladders/")}
    assert sorted(pages_of(read("mkdocs.yml")["nav"])) == sorted(pages - ladders)
    assert all(f"({page})" in (docs / "ladder.md").read_text() for page in ladders)


def test_the_site_opens_with_the_readme_and_stays_on_the_site() -> None:
    """A reader of the site alone finds how to install, the figures, and every page."""
    hooks = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))
    index = (ROOT / "docs" / hooks["START"]).read_text()
    shown = hooks["start"](index, URL)
    assert hooks["INDEX"] in (ROOT / "README.md").read_text()
    assert "pip install" in shown and "(images/climb.svg)" in shown
    assert f"{URL}/blob/main/docs/" not in shown and f"{URL}/raw" not in shown
    assert index.partition("\n")[2] in shown
    cited = {name for pair in re.findall(r"\]\[([^\]]+)\]|\(\[([^\]]+)\]\)", shown) for name in pair if name}
    assert cited <= set(re.findall(r"^\[([^\]]+)\]: ", shown, re.MULTILINE))


def test_release_notes_are_the_section_of_the_changelog() -> None:
    notes = subprocess.run(
        ("make", "--no-print-directory", "notes", "VERSION=0.1.0"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    _, _, section = (ROOT / "CHANGELOG.md").read_text().partition("## [0.1.0] - ")
    assert notes.strip() and notes.strip() in section and "## [" not in notes


def test_the_reference_has_every_operator() -> None:
    hooks = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))
    listed = {path.rpartition(".")[2] for path in hooks["operators"]()}
    assert listed == {name for name in escalade.ops.__all__ if name.islower()}
    assert hooks["OPERATORS"] in (ROOT / "docs/api/ops.md").read_text()
    assert all(getattr(escalade.ops, name).__doc__ for name in listed)


def test_the_page_on_versions_has_every_architecture_and_floor() -> None:
    page = (ROOT / "docs/support.md").read_text()
    assert set(re.findall(r"`(sm_\w+)`", page)) == set(ARCHITECTURES)
    (torch,) = (each.partition(">=")[2] for each in PROJECT["dependencies"] if each.startswith("torch>="))
    assert f"| PyTorch | {torch} or newer |" in page
    assert f"| Python | {PROJECT['requires-python'].removeprefix('>=')} or newer |" in page
