"""Engines as files: what is saved comes back, and what is not an engine is refused."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from escalade.engine import Engine, compile, load
from escalade.engine.file import FileError


class Mixed(nn.Module):
    """Kernels, PyTorch's own operators, shared weights, a size that follows the batch, and several results."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 8)
        self.token = nn.Parameter(torch.randn(1, 8))
        self.table = nn.Buffer(torch.arange(8))

    def forward(self, x: torch.Tensor, *, low: torch.Tensor) -> dict[str, torch.Tensor]:
        y = F.interpolate(F.relu6(self.norm(self.conv(x))), scale_factor=2.0, mode="bilinear")
        z = self.fc(self.fc(y.mean((2, 3)))).masked_fill(low > 0, float("-inf"))
        z = torch.cat([z, self.token.expand(x.shape[0], -1)], 1)
        return {"z": z, "picked": y[:, self.table.flip(0)], "which": z.argmax(1), "half": y.sum(1).half()}


@pytest.fixture(scope="module")
def mixed() -> tuple[Mixed, Engine]:
    torch.manual_seed(7)
    model = Mixed().eval()
    engine = compile(model, (torch.randn(1, 3, 6, 6),), {"low": torch.randn(1, 8)})
    return model, engine


@pytest.fixture
def saved(mixed: tuple[Mixed, Engine], tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "mixed.engine"
    mixed[1].save(path)
    return path


def test_what_is_saved_comes_back(mixed: tuple[Mixed, Engine], saved: pathlib.Path) -> None:
    model, engine = mixed
    again = load(saved, device="cpu")
    assert again.dtype == engine.dtype and again.graph.notes == engine.graph.notes
    for batch in (1, 4):
        x, low = torch.randn(batch, 3, 6, 6), torch.randn(batch, 8)
        results = again(x, low=low)
        torch.testing.assert_close(results, engine(x, low=low), rtol=0, atol=0)
        torch.testing.assert_close(results, model(x, low=low))
        assert results["half"].dtype == torch.float16
    second = saved.with_name("second.engine")
    again.save(second)
    with safe_open(saved, framework="pt") as one, safe_open(second, framework="pt") as two:
        assert one.metadata() == two.metadata()  # its checksum among it


def test_nothing_else_is_left_behind(saved: pathlib.Path) -> None:
    assert list(saved.parent.iterdir()) == [saved]


def test_shared_weights_are_written_once(tmp_path: pathlib.Path) -> None:
    layer = nn.Linear(100, 100)
    compile(nn.Sequential(layer, nn.ReLU(), layer), torch.randn(1, 100)).save(tmp_path / "shared.engine")
    assert (tmp_path / "shared.engine").stat().st_size < 1.3 * 4 * 10_100


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_type_and_the_normalisation_are_kept(dtype: str, tmp_path: pathlib.Path) -> None:
    x = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU())
    engine = compile(model, x, dtype=dtype, normalize=((0.5,) * 3, (0.2,) * 3))
    engine.save(tmp_path / "n.engine")
    again = load(tmp_path / "n.engine", device="cpu")
    assert again.dtype == dtype
    torch.testing.assert_close(again(x), engine(x), rtol=0, atol=0)


def test_limits_of_the_batch_are_kept(tmp_path: pathlib.Path) -> None:
    class Squeezed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.squeeze()

    engine = compile(Squeezed(), torch.randn(2, 3, 1))
    engine.save(tmp_path / "s.engine")
    assert load(tmp_path / "s.engine", device="cpu").graph.batches == engine.graph.batches == (2, None)


def rewrite(path: pathlib.Path, **changed: str | None) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(path)
    metadata.update({key: value for key, value in changed.items() if value is not None})
    for key, value in changed.items():
        if value is None:
            metadata.pop(key)
    save_file(tensors, path, metadata)


def test_every_kind_of_damage_is_noticed(saved: pathlib.Path) -> None:
    whole = saved.read_bytes()
    for position in (len(whole) - 3, len(whole) - 400):  # a weight
        damaged = bytearray(whole)
        damaged[position] ^= 1
        saved.write_bytes(damaged)
        with pytest.raises(FileError, match="damaged"):
            load(saved, device="cpu")
    for length in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        saved.write_bytes(whole[:length])
        with pytest.raises(FileError, match="not an engine that Escalade has saved, or is damaged"):
            load(saved, device="cpu")


def test_a_changed_graph_is_noticed(saved: pathlib.Path) -> None:
    with safe_open(saved, framework="pt") as file:
        graph = json.loads(file.metadata()["graph"])
    graph["outputs"].reverse()
    rewrite(saved, graph=json.dumps(graph))
    with pytest.raises(FileError, match="its contents do not match its checksum"):
        load(saved, device="cpu")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": "2"}, "has version 2 of the file format; this Escalade reads version 1"),
        ({"version": "new"}, "has version new of the file format"),
        ({"version": None}, "version"),
        ({"format": "other"}, "is not an engine that Escalade has saved"),
        ({"graph": None}, "damaged"),
        ({"dtype": None}, "damaged"),
        ({"sha256": None}, "damaged"),
    ],
)
def test_other_contents_are_refused(
    saved: pathlib.Path, changed: dict[str, str | None], message: str
) -> None:
    rewrite(saved, **changed)
    with pytest.raises(FileError, match=message):
        load(saved, device="cpu")


def test_other_files_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileError, match="there is no file"):
        load(tmp_path / "none.engine")
    with pytest.raises(FileError, match="there is no file"):
        load(tmp_path)
    save_file({"w": torch.zeros(3)}, tmp_path / "weights.safetensors")
    with pytest.raises(FileError, match="is not an engine"):
        load(tmp_path / "weights.safetensors")
    (tmp_path / "text").write_text("cat " * 100)
    with pytest.raises(FileError, match="is not an engine"):
        load(tmp_path / "text")


def test_devices_that_are_not_there_are_named(saved: pathlib.Path) -> None:
    from escalade.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="an engine runs on cuda, on cpu, or on the twin"):
        load(saved, device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="there is no GPU here"):
            load(saved, device="cuda")


def test_a_place_that_cannot_be_written_is_named(mixed: tuple[Mixed, Engine], tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileError, match="cannot be written"):
        mixed[1].save(tmp_path / "no" / "such" / "folder.engine")
