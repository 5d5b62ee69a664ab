"""A local Ray with CPU engines: every image is in the results once, whichever process is killed."""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from escalade import cli
from escalade.errors import UnsupportedError
from escalade.version import VERSION
from tests import fresh
from tests.ray.networks import picture

pytest.importorskip("ray", reason="Ray is not installed: pip install 'escalade[ray]'")
dataset = pytest.importorskip(
    "pyarrow.dataset", reason="pyarrow is not installed: pip install 'escalade[ray]'"
)

from escalade_apps.ray import Job, Network, Part  # noqa: E402
from tests.ray import workers  # noqa: E402

IMAGES, SHARD = 60, 10
UNREADABLE = 7
"""The file that is not an image."""


pytestmark = pytest.mark.usefixtures("patience")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("images")
    for number in range(IMAGES):
        picture(number).save(folder / f"{number:03}.png")
    (folder / f"{UNREADABLE:03}.png").write_text("not an image")
    return folder


def require_all_once(folder: pathlib.Path, form: str, images: pathlib.Path, network: pathlib.Path) -> None:
    """Each image has one row, in its own shard, with its provenance."""
    rows: list[dict[str, Any]] = dataset.dataset(folder, format=form).to_table().to_pylist()
    files = sorted(map(str, images.iterdir()))
    assert sorted(row["file"] for row in rows) == files
    made_of = Network.read(network)
    for row in rows:
        assert row["shard"] == files.index(row["file"]) // SHARD
        assert (row["dtype"], row["device"], row["version"]) == ("fp32", "cpu", VERSION)
        assert (row["weights"], row["sha256"]) == (str(network), made_of.sha256)
    (unreadable,) = (row for row in rows if row["unreadable"])
    assert unreadable["file"] == files[UNREADABLE] and "not an image" in unreadable["unreadable"]


def written(part: pathlib.Path) -> tuple[int, int]:
    """The file, and its modification time."""
    return part.stat().st_ino, part.stat().st_mtime_ns


def _kill_worker(address: str, images: pathlib.Path, network: pathlib.Path, tmp_path: pathlib.Path) -> None:
    results = tmp_path / "results"
    job = Job(
        [str(images), str(images / "003.png")], str(results), Network.read(network),
        workers=2, batch=10, top=1, shard=SHARD, predictor=workers.Killed,
    )  # fmt: skip
    assert job.images == job.images_left == IMAGES
    parts = sorted(job.run(), key=lambda part: part.shard)
    assert network.with_name("killed").exists()
    assert parts == [Part(number, SHARD, int(number == 0)) for number in range(IMAGES // SHARD)]
    require_all_once(results, "parquet", images, network)
    with pytest.raises(UnsupportedError, match="results of another job.*top is 1 there and 2 now"):
        Job([str(images)], str(results), Network.read(network), top=2, shard=SHARD)


def _kill_driver(address: str, images: pathlib.Path, network: pathlib.Path, tmp_path: pathlib.Path) -> None:
    results = tmp_path / "results"
    arguments = (address, images, results, network, SHARD)
    killed = fresh.python("-m", workers.__name__, *map(str, arguments))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    there = {part: written(part) for part in results.glob("part-*")}
    assert len(there) == workers.OVER
    again = CliRunner().invoke(
        cli.app,
        [
            "classify", str(images), "--network", str(network), "--ray", address, "--output", str(results),
            "--format", "csv", "--shard", str(SHARD), "--workers", "1", "--batch", "10", "--top", "1",
        ],
        catch_exceptions=False,
    )  # fmt: skip
    left = IMAGES - workers.OVER * SHARD
    said = " ".join(again.output.split())
    assert f"{left} images in" in said and f"{IMAGES - left} were already done" in said
    assert again.exit_code == 0, again.output
    require_all_once(results, "csv", images, network)
    assert {part: written(part) for part in there} == there
    assert list((results / "_unfinished").iterdir()) == []


@pytest.mark.share(7)  # a minute on two cores: every process of Ray imports PyTorch
@pytest.mark.parametrize("kill", [_kill_worker, _kill_driver])
def test_no_image_is_lost_or_repeated(
    kill: Callable[..., None],
    address: str,
    images: pathlib.Path,
    network: pathlib.Path,
    tmp_path: pathlib.Path,
) -> None:
    kill(address, images, network, tmp_path)
