"""Processes that read and decode files: same results as threads, whatever happens to them, and none is left behind."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from escalade import subprocesses
from escalade.interruption import POLL_SECONDS
from escalade_apps.classify import reading, workers
from escalade_apps.classify.decode_worker import FLUSH_BYTES, ReadResult
from escalade_apps.classify.images import Crop, DecodedImage, Unreadable, try_decode
from escalade_apps.classify.jpeg import JpegBytes
from escalade_apps.classify.workers import DIED

ROOT = pathlib.Path(__file__).parent.parent.parent
CROP = Crop(36, 32)
COUNT = 40
LONGEST = 50
"""Seconds; shorter than the fork server's idle time, so a process that ends sooner ended for another reason."""


@pytest.fixture(autouse=True)
def always_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them work, however few files there are."""
    monkeypatch.setattr(reading, "_MIN_FOR_WORKERS", 1)
    monkeypatch.setattr(reading, "cores", lambda: 2)


@pytest.fixture
def nothing_begun() -> Iterator[None]:
    """Start without the fork server of another test, and leave none."""
    workers.shutdown()
    yield
    workers.shutdown()


@pytest.fixture
def files(tmp_path: pathlib.Path) -> list[pathlib.Path]:
    """Distinct images, and some that cannot be read."""
    made = [tmp_path / f"{number:02}.{'png' if number % 3 else 'jpg'}" for number in range(COUNT)]
    for number, file in enumerate(made):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file)
    made[5].write_text("no image")
    made[17] = tmp_path / "missing.jpg"
    return made


def same(found: Sequence[ReadResult], files: Sequence[pathlib.Path], crop: Crop = CROP) -> bool:
    """Return True if each is Pillow's result."""
    return len(found) == len(files) and all(
        each.file == file and _is(each, try_decode(file, crop))
        for each, file in zip(found, files, strict=True)
    )


def _is(found: ReadResult, expected: DecodedImage | Unreadable) -> bool:
    if isinstance(found, DecodedImage) and isinstance(expected, DecodedImage):
        return np.array_equal(found.pixels, expected.pixels)
    return isinstance(found, Unreadable) and found == expected


def processes() -> list[int]:
    """The workers of all jobs that have reported."""
    known = [worker.process for job in workers._jobs for worker in job.workers.values()]
    return [process for process in known if process is not None]


def wait_for_the_end(gone: Sequence[int]) -> None:
    until = time.monotonic() + LONGEST
    for process in gone:
        while pathlib.Path(f"/proc/{process}/cmdline").exists():
            assert time.monotonic() < until, "a worker is left"
            time.sleep(0.01)


def refuse(function: str, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    raise PermissionError("no processes here")


def not_asked(*_: object, **__: object) -> None:
    raise AssertionError("files are read here")


def test_files_are_read_by_processes_in_their_order_and_kept_as_long_as_they_are_wanted(
    files: list[pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More chunks than buffers; all images are checked in the end."""
    monkeypatch.setattr(reading, "map_ordered", not_asked)
    many = files * 5
    found = list(reading.decode_all(many, CROP, ahead=8))
    assert same(found, many)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns if memory is read-only
        assert isinstance(found[0], DecodedImage) and torch.from_numpy(found[0].pixels).shape == (32, 32, 3)


def test_memory_is_reused_once_its_contents_are_unreferenced(files: list[pathlib.Path]) -> None:
    many = files * 10
    buffers = 0
    for _ in reading.decode_all(many, CROP, ahead=8):
        buffers = max(
            buffers, sum(worker.buffers for job in workers._jobs for worker in job.workers.values())
        )
    assert 0 < buffers < len(many) // reading._DECODE_CHUNK // 2


def test_jpeg_files_come_as_they_are_where_every_decoder_reads_them_alike(
    files: list[pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "map_ordered", not_asked)
    found = [each for some in reading.open_all(files, CROP, ahead=8) for each in some]
    photographs = [each for each in found if isinstance(each, JpegBytes)]
    assert [each.file for each in photographs] == [f for f in files if f.suffix == ".jpg" and f.exists()]
    for each in photographs:
        assert each.contents.tobytes() == pathlib.Path(str(each.file)).read_bytes()
        assert (each.width, each.height) == (48, 40)
    others = [each for each in found if not isinstance(each, JpegBytes)]
    assert same(others, [file for file in files if file not in {each.file for each in photographs}])


NAMES = (b"no utf-8 \xe9.png", b"two\nlines.png", b"\x80\xff\xfe", b"spaces  .jpg", b"x" * 300, b"nul\0.png")


def test_names_are_bytes_and_relative_to_the_current_folder_at_the_request(
    files: list[pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.prestart()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    names = [pathlib.Path(os.fsdecode(name)) for name in NAMES]
    for number, name in enumerate(names[:4]):
        name.write_bytes(files[number].read_bytes())
    found = list(reading.decode_all(names, CROP, ahead=2))
    assert same(found, names)
    assert [isinstance(each, DecodedImage) for each in found] == [True] * 4 + [False] * 2


def test_pillow_settings_of_this_process_apply_in_workers(
    files: list[pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[:-40])
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    found = list(reading.decode_all(files, CROP, ahead=8))
    assert isinstance(found[0], DecodedImage) and same(found, files)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    found = list(reading.decode_all(files, CROP, ahead=8))
    assert all(isinstance(each, Unreadable) for each in found) and same(found, files)


@pytest.mark.usefixtures("nothing_begun")
def test_formats_registered_with_pillow_here_are_read_in_workers(
    files: list[pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def opener(stream: object, name: object) -> None:
        raise SyntaxError("not this one")

    monkeypatch.setattr(subprocesses, "start_python", not_asked)
    monkeypatch.setitem(Image.OPEN, "OWN", (opener, None))
    assert same(list(reading.decode_all(files, CROP, ahead=8)), files)


def a_worker_not_in(killed: set[int]) -> int:
    """Return a worker's process. A killed one is listed until the job has noticed its end, and its replacement only
    once that has answered: the job polls until one exists."""
    (job,) = [job for job in workers._jobs if job.workers]
    while not (alive := [process for process in processes() if process not in killed]):
        assert job.workers, "no worker is left"
        job._poll(POLL_SECONDS)
    return alive[0]


@pytest.mark.parametrize("ahead", [1, 1000])
def test_a_worker_that_is_killed_loses_nothing(ahead: int, files: list[pathlib.Path]) -> None:
    many = files * 4
    found: list[DecodedImage | Unreadable] = []
    killed: set[int] = set()
    for each in reading.decode_all(many, CROP, ahead):
        found.append(each)
        if len(found) in (1, 20, 100):
            victim = a_worker_not_in(killed)
            killed.add(victim)
            os.kill(victim, signal.SIGKILL)
    assert len(killed) == 3 and same(found, many)


def test_killing_all_workers_and_the_fork_server_loses_nothing(files: list[pathlib.Path]) -> None:
    many = files * 4
    found: list[DecodedImage | Unreadable] = []
    for each in reading.decode_all(many, CROP, 8):
        found.append(each)
        if len(found) in (1, 50):
            assert workers._server.process is not None
            subprocesses.kill(workers._server.process)
    assert same(found, many)


def run_first(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server runs a script instead of its own code."""
    monkeypatch.setattr(subprocesses, "_python", lambda function: [sys.executable, "-c", script])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


SERVING = "from escalade_apps.classify import decode_worker as work; work.serve()"
DYING = """
import os, signal
from escalade_apps.classify import decode_worker as work

def try_decode(file, crop, real=work.try_decode):
    if "deadly" in file.name:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(file, crop)

work.try_decode = try_decode
work.serve()
"""


@pytest.mark.usefixtures("nothing_begun")
def test_a_file_that_kills_processes_is_reported_unreadable_and_the_others_are_read(
    files: list[pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (0, 9, 10, COUNT - 1):
        files[number] = files[number].rename(files[number].with_name(f"deadly {number}.png"))
    run_first(DYING, monkeypatch)
    found = list(reading.decode_all(files, CROP, ahead=8))
    assert {each.file for each in found if isinstance(each, Unreadable) and each.reason == DIED} == {
        file for file in files if "deadly" in file.name
    }
    assert same(
        [each for each in found if "deadly" not in each.file.name],
        [f for f in files if "deadly" not in f.name],
    )


@pytest.mark.usefixtures("nothing_begun")
@pytest.mark.parametrize("script", [None, "", "import os; del os.memfd_create; " + SERVING])
def test_where_there_are_no_processes_threads_read_the_files(
    script: str | None,
    files: list[pathlib.Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """None can be started, they exit at once, or shared memory cannot be allocated."""
    if script is None:
        monkeypatch.setattr(subprocesses, "start_python", refuse)
    else:
        run_first(script, monkeypatch)
    with caplog.at_level("DEBUG", "escalade"):
        assert same(list(reading.decode_all(files, CROP, ahead=8)), files)
    assert "reading files in threads" in caplog.text
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("nothing_begun")
def test_few_files_start_no_process(files: list[pathlib.Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MIN_FOR_WORKERS", len(files) + 1)
    monkeypatch.setattr(subprocesses, "start_python", not_asked)
    reading.prestart(files)
    assert same(list(reading.decode_all(files, CROP, ahead=8)), files)


def test_stopping_early_leaves_no_worker(files: list[pathlib.Path]) -> None:
    made = reading.decode_all(files * 10, CROP, ahead=8)
    next(made)
    begun = processes()
    assert begun
    made.close()
    assert not processes()
    wait_for_the_end(begun)


def test_workers_do_not_hear_ctrl_c(files: list[pathlib.Path]) -> None:
    with closing(reading.decode_all(files * 10, CROP, ahead=8)) as made:
        next(made)
        begun = processes()
        assert workers._server.process is not None
        for process in (*begun, workers._server.process.pid):
            os.kill(process, signal.SIGINT)
        last = len(files) * 10 - 1
        assert len([*islice(made, last - 1)]) == last - 1
        assert begun and set(begun) <= set(processes()) and workers._server.process.poll() is None


@pytest.fixture
def large(tmp_path: pathlib.Path) -> list[pathlib.Path]:
    """Photographs with comments of a few megabytes: one worker's share exceeds its shared buffer."""
    comment = b"\xff\xfe\xff\xff" + bytes(65533)
    made = []
    for number in range(5):
        file = tmp_path / f"{number}.jpg"
        Image.new("RGB", (40 + number, 40), (9 * number, 99, 9)).save(file)
        plain = file.read_bytes()
        file.write_bytes(plain[:2] + comment * (FLUSH_BYTES // 3 // len(comment) + 1) + plain[2:])
        made.append(file)
    return made


@pytest.mark.parametrize("held", [0, 2**30])
def test_a_share_of_large_files_is_done_in_parts_and_no_more_of_them_than_there_is_room_for(
    held: int, large: list[pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_MAX_HELD_BYTES", held)
    given = workers.read_chunks([large, large, large], CROP, keep_jpeg=True, ahead=3, count=2)
    with closing(given) as made:
        found = next(made)
        (job,) = [job for job in workers._jobs if job.workers]
        assert held or not any(chunk.results for chunk in job._pending)
        found = [*found, *(each for some in made for each in some)]
    assert [each.file for each in found] == large * 3
    for each in found:
        assert isinstance(each, JpegBytes)
        assert each.contents.tobytes() == pathlib.Path(str(each.file)).read_bytes()
    first, *_, last = found[: len(large)]
    assert isinstance(first, JpegBytes) and isinstance(last, JpegBytes)
    assert first.contents.base is not last.contents.base


def run(script: str, *arguments: object) -> str:
    """Output of a script. It ends when every process that can write to its stderr has exited."""
    done = subprocess.run(
        [sys.executable, "-c", BEGINNING + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LONGEST,
        cwd=ROOT,
    )
    assert not done.stderr
    return done.stdout


BEGINNING = """
import os, pathlib, signal, sys, time
from escalade_apps.classify import reading, workers
from escalade_apps.classify.images import Crop

reading._MIN_FOR_WORKERS = 1
files = sorted(pathlib.Path(name) for name in sys.argv[1:])
made = reading.decode_all(files * 100, Crop(36, 32), 8)
next(made)
begun = [worker.process for job in workers._jobs for worker in job.workers.values()]
"""


@pytest.mark.parametrize("way", ["pass", "os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_they_end_with_the_process_that_began_them(way: str, files: list[pathlib.Path]) -> None:
    run(way, *files[:4])


FORKED = """
if os.fork():
    os._exit(0)
for stream in (1, 2):
    os.close(stream)
until = time.monotonic() + 60
while time.monotonic() < until and any(os.path.exists(f"/proc/{process}") for process in begun if process):
    time.sleep(0.02)
os._exit(0)
"""


def test_they_do_not_wait_for_a_process_that_was_forked(files: list[pathlib.Path]) -> None:
    run(FORKED, *files[:4])


ALONE = """
import sys, escalade_apps.classify.decode_worker
print({name.split(".")[0] for name in sys.modules} & {"torch", "cuda"})
"""


def test_they_import_no_pytorch() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.usefixtures("nothing_begun")
def test_they_exit_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    run_first(SERVING.replace("work.serve", "work.IDLE_SECONDS = 0.0; work.serve"), monkeypatch)
    workers.prestart()
    assert workers._server.process is not None
    assert workers._server.process.wait(LONGEST) == 0
