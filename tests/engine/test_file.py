"""Engines as files: saved engines are restored, and other files are refused."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import stat
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from escalade.engine import Engine, compile, load
from escalade.engine.file import FileError, fingerprint, to_device


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


def test_saved_engines_are_restored(mixed: tuple[Mixed, Engine], saved: pathlib.Path) -> None:
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
        assert one.metadata() == two.metadata()  # including its checksum


def test_nothing_else_is_left_behind(saved: pathlib.Path) -> None:
    assert list(saved.parent.iterdir()) == [saved]


def test_shared_weights_are_written_once(tmp_path: pathlib.Path) -> None:
    layer = nn.Linear(100, 100)
    compile(nn.Sequential(layer, nn.ReLU(), layer), torch.randn(1, 100)).save(tmp_path / "shared.engine")
    assert (tmp_path / "shared.engine").stat().st_size < 1.3 * 4 * 10_100


def test_shared_weights_are_moved_once() -> None:
    layer = nn.Linear(4, 4)
    graph = compile(nn.Sequential(layer, nn.ReLU(), layer), torch.randn(1, 4)).graph
    graph.constants["another"] = next(iter(graph.constants.values()))
    moved = to_device(graph, torch.device("meta")).constants
    assert {tensor.device.type for tensor in moved.values()} == {"meta"}
    for one, other in combinations(graph.constants, 2):
        assert (moved[one] is moved[other]) == (graph.constants[one] is graph.constants[other])


def test_constants_of_the_same_memory_may_be_different(tmp_path: pathlib.Path) -> None:
    """A matrix and its transpose have the same address and sizes; so do floats and their bits."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Buffer(torch.randn(5, 5)), nn.Buffer(torch.randn(5, 5))
            self.three = nn.Buffer(torch.zeros(5, 5, dtype=torch.int32))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x * self.one, x * self.two, x * self.three

    x = torch.randn(2, 5, 5)
    graph = compile(Twice(), x).graph
    matrix = torch.randn(5, 5)
    graph.constants |= {"b_one": matrix, "b_two": matrix.t(), "b_three": matrix.view(torch.int32)}
    Engine(graph, "fp32", "cpu").save(tmp_path / "t.engine")
    again = load(tmp_path / "t.engine", device="cpu")(x)
    torch.testing.assert_close(again, (x * matrix, x * matrix.t(), x * matrix.view(torch.int32)))


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


class Call(nn.Module):
    """A function as a module, with submodules."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *arguments: Any) -> Any:
        return self.function(*self.parts, *arguments)


def _in_place(x: torch.Tensor) -> torch.Tensor:
    y = F.hardswish(x * 2, inplace=True).mul_(2)
    y[:, 0] = 1
    return y.masked_fill_(y > 3, 0.5)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.ConvTranspose2d(3, 4, 3, 2, 1), (3, 4, 4)),
        (Call(lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear")), (3, 4, 4)),
        (Call(lambda x: F.silu(x) + F.mish(x) + F.elu(x) + F.leaky_relu(x) + x.sigmoid() + x.tanh()), (3, 4)),
        (Call(_in_place), (3, 4)),
        (nn.LayerNorm([3, 4]), (3, 4)),
        (nn.GroupNorm(2, 4), (4, 3, 3)),
        (nn.InstanceNorm2d(4, affine=True), (4, 3, 3)),
        (Call(lambda a, x: a(x, x, x)[0], nn.MultiheadAttention(8, 2, batch_first=True)), (3, 8)),
        (Call(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)), (2, 3, 8)),
        (Call(lambda r, x: r(x)[0], nn.LSTM(4, 3, batch_first=True)), (3, 4)),
        (Call(lambda x: torch.einsum("bij,bkj->bik", x, x)), (3, 4)),
        (Call(lambda e, x: e(x.long().clamp(0, 4)), nn.Embedding(5, 3)), (4,)),
        (Call(lambda x: F.pad(x, (1, 2, 1, 0), mode="reflect").roll(1, 2).flip(-1)), (2, 4, 4)),
        (Call(lambda x: torch.cat(x.chunk(2, 1)[::-1] + x.split([1, 3], 1), 1)[:, 1:, ::2]), (4, 4)),
        (Call(lambda x: x.gather(1, x.argsort(1)) + x.topk(2)[0].sum(1, keepdim=True)), (4,)),
        (Call(lambda x: torch.where(x > 0, x, 0.0).cumsum(1) + torch.ones(4, 4).triu(1)), (4, 4)),
        (Call(lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True) + F.normalize(x)), (4,)),
        (Call(lambda x: torch.fft.rfft2(x).abs()), (3, 4, 4)),
        (Call(lambda x: F.pixel_shuffle(x, 2).permute(0, 2, 3, 1).repeat(1, 2, 1, 1)), (4, 3, 3)),
        (Call(lambda x: torch.cat([x, torch.zeros(x.shape[0], 2, device=x.device)], 1)), (4,)),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (4,)),
    ],
)
def test_pytorch_steps_are_saved(model: nn.Module, shape: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    engine = compile(model.eval(), torch.randn(2, *shape))
    engine.save(tmp_path / "p.engine")
    x = torch.randn(3, *shape)
    torch.testing.assert_close(load(tmp_path / "p.engine", device="cpu")(x), engine(x), rtol=0, atol=0)


Pair = namedtuple("Pair", ["first", "second"])


def test_structures_that_need_no_import_come_back(tmp_path: pathlib.Path) -> None:
    def nested(x: torch.Tensor, more: dict[str, Any]) -> Any:
        return OrderedDict(b=[x + 1, (more["y"],)], a={3: x * 2, "s": more["z"][0]})

    engine = compile(Call(nested), (x := torch.randn(2, 3), more := {"z": [x * 3], "y": x * 4}))
    engine.save(tmp_path / "n.engine")
    result = load(tmp_path / "n.engine", device="cpu")(x, more)
    torch.testing.assert_close(result, nested(x, more))
    assert type(result) is OrderedDict and list(result) == ["b", "a"] and type(result["b"][1]) is tuple


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: Pair(x + 1, x * 2), "returns a Pair; a file supports tuples"),
        (lambda x: x.max(1), "returns a max; a file supports tuples"),
        (lambda x: {None: x + 1}, "returns a dict with the keys None"),
        (torch.linalg.svdvals, "aten::linalg_svdvals is none of the operators"),
    ],
)
def test_unsavable_models_still_compile(
    function: Callable[..., Any], message: str, tmp_path: pathlib.Path
) -> None:
    x = torch.randn(3, 4)
    engine = compile(Call(function), x)
    torch.testing.assert_close(engine(x), function(x))
    assert type(engine(x)) is type(function(x))
    with pytest.raises(FileError, match=f"this engine cannot be saved: .*{message}"):
        engine.save(tmp_path / "no.engine")
    assert not list(tmp_path.iterdir())


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
        with pytest.raises(FileError, match="not an Escalade engine file, or is damaged"):
            load(saved, device="cpu")


def test_damage_is_reported_before_its_consequences(
    saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is built while the weights are still being hashed."""

    def refuse(*given: object, **options: object) -> None:
        raise ArithmeticError("these weights come to nothing")

    monkeypatch.setattr("escalade.engine.compiler.Engine", refuse)
    with pytest.raises(ArithmeticError):
        load(saved, device="cpu")
    damaged = bytearray(saved.read_bytes())
    damaged[-3] ^= 1
    saved.write_bytes(damaged)
    with pytest.raises(FileError, match="damaged"):
        load(saved, device="cpu")


def test_the_checksum_is_of_names_types_and_sizes_too(saved: pathlib.Path) -> None:
    """The same bytes under other names or views are other weights."""
    with safe_open(saved, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(saved)
    ends = [name for name, tensor in tensors.items() if tensor.shape == (8,) and tensor.is_floating_point()]
    one, other, *_ = sorted(ends)
    name = next(name for name, tensor in tensors.items() if tensor.shape == (8, 8))
    for changed in (
        {one: tensors[other], other: tensors[one]},
        {name: tensors[name].t().contiguous()},
        {name: tensors[name].view(4, 16)},
        {name: tensors[name].view(torch.int32)},
    ):
        saved.unlink()
        save_file(tensors | changed, saved, metadata)
        with pytest.raises(FileError, match="is damaged: its contents do not match its checksum"):
            load(saved, device="cpu")
    renamed = {f"{name}0" if name == one else name: tensor for name, tensor in tensors.items()}
    saved.unlink()
    save_file(renamed, saved, metadata)
    with pytest.raises(FileError, match="is damaged"):
        load(saved, device="cpu")
    saved.unlink()
    save_file(tensors, saved, {**metadata, "dtype": "fp16"})
    with pytest.raises(FileError, match="is damaged"):
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
        ({"version": "7"}, "has file format version .7.; this Escalade reads versions 2 to 6"),
        ({"carried": "{}"}, "damaged"),
        ({"version": "new"}, "has file format version .new."),
        ({"version": None}, "version"),
        ({"format": "other"}, "is not an Escalade engine file"),
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
    with pytest.raises(FileError, match="does not exist|is not a regular file"):
        load(tmp_path / "none.engine")
    with pytest.raises(FileError, match="does not exist|is not a regular file"):
        load(tmp_path)
    save_file({"w": torch.zeros(3)}, tmp_path / "weights.safetensors")
    with pytest.raises(FileError, match="is not an Escalade engine file"):
        load(tmp_path / "weights.safetensors")
    (tmp_path / "text").write_text("cat " * 100)
    with pytest.raises(FileError, match="is not an Escalade engine file"):
        load(tmp_path / "text")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "escalade-engine", "version": "1"}])
def test_no_weights_are_read_from_other_files(
    metadata: dict[str, str] | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may exceed memory."""

    class Opened(contextlib.nullcontext[Any]):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(self)

        def metadata(self) -> dict[str, str] | None:
            return metadata

        def keys(self) -> list[str]:
            return ["w"]

        def get_tensor(self, name: str) -> torch.Tensor:
            pytest.fail(f"{name} is read")

    (tmp_path / "foreign").touch()
    monkeypatch.setattr("escalade.engine.file.safe_open", Opened)
    with pytest.raises(FileError, match="is not an Escalade engine file$|reads versions"):
        load(tmp_path / "foreign", device="cpu")


def test_a_network_has_one_fingerprint_however_often_it_is_compiled(saved: pathlib.Path) -> None:
    torch.manual_seed(1)
    model, other = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), nn.Sequential(nn.Linear(4, 3), nn.ReLU())

    def found(model: nn.Module, batch: int = 1, dtype: str = "fp16") -> str:
        engine = compile(model, torch.randn(batch, 4), dtype=dtype)
        return fingerprint(engine.graph, engine.dtype)

    assert found(model) == found(model, batch=3)
    assert len({found(model), found(other), found(model, dtype="fp32")}) == 3
    again = load(saved, device="cpu")
    assert fingerprint(again.graph, again.dtype) == checksum_of(saved)


def checksum_of(path: pathlib.Path) -> str:
    with safe_open(path, framework="pt") as file:
        return str(file.metadata()["sha256"])


def test_a_file_that_changes_later_changes_no_engine(
    mixed: tuple[Mixed, Engine], saved: pathlib.Path
) -> None:
    again = load(saved, device="cpu")
    size = saved.stat().st_size
    with saved.open("r+b") as file:
        file.write(bytes(size))
    x, low = torch.randn(2, 3, 6, 6), torch.randn(2, 8)
    torch.testing.assert_close(again(x, low=low), mixed[1](x, low=low), rtol=0, atol=0)


def test_devices_that_are_not_there_are_named(saved: pathlib.Path) -> None:
    from escalade.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="engines run on cuda, cpu or twin"):
        load(saved, device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="no GPU is available"):
            load(saved, device="cuda")


def test_a_place_that_cannot_be_written_is_named(mixed: tuple[Mixed, Engine], tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileError, match="cannot be written"):
        mixed[1].save(tmp_path / "no" / "such" / "folder.engine")


def test_files_are_as_open_as_the_user_has_it(mixed: tuple[Mixed, Engine], tmp_path: pathlib.Path) -> None:
    for mask, mode in ((0o077, 0o600), (0o002, 0o664)):
        before = os.umask(mask)
        try:
            mixed[1].save(tmp_path / f"{mode}.engine")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / f"{mode}.engine").stat().st_mode) == mode


def test_a_file_that_is_replaced_stays_as_open_as_it_was(
    mixed: tuple[Mixed, Engine], saved: pathlib.Path
) -> None:
    for mode in (0o600, 0o640, 0o664):
        saved.chmod(mode)
        mixed[1].save(saved)
        assert stat.S_IMODE(saved.stat().st_mode) == mode


@pytest.mark.parametrize("failing", ["save_file", "os.replace", "os.fsync"])
def test_a_failure_leaves_the_old_file(
    failing: str, mixed: tuple[Mixed, Engine], saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(f"escalade.engine.file.{failing}", fails)
    with pytest.raises(FileError, match="cannot be written: .*no space left"):
        mixed[1].save(saved)
    assert saved.read_bytes() == before and list(saved.parent.iterdir()) == [saved]


def test_special_files_are_not_written_to(mixed: tuple[Mixed, Engine], tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for place in (
        tmp_path,
        tmp_path / "fifo",
        "/dev/null",
        tmp_path / "fifo" / "f",
        None,
        "a\0b",
        tmp_path / ("n" * 300),
    ):
        with pytest.raises(FileError):
            mixed[1].save(place)
    assert [entry.name for entry in tmp_path.iterdir()] == ["fifo"]
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode) and stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_link_stays_one(mixed: tuple[Mixed, Engine], tmp_path: pathlib.Path) -> None:
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link.engine"
    link.symlink_to(tmp_path / "folder" / "real.engine")
    mixed[1].save(link)
    mixed[1].save(tmp_path / ("n" * 250))  # near the maximum length of names
    assert link.is_symlink() and (tmp_path / "folder" / "real.engine").is_file()
    load(link, device="cpu")
