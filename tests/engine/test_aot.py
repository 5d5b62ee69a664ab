"""AOT data of a file for GPUs: plans are rebuilt from it, and machine code needs no compiler."""

from __future__ import annotations

import copy
import json
import pathlib
import pickle
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from escalade.device import nvrtc
from escalade.engine import Engine, compile, load
from escalade.engine.aot import AotArtifacts, from_json
from escalade.engine.file import FileError, _digest, read
from escalade.engine.graph.forms import InputFormat
from escalade.engine.settings import Settings
from escalade.errors import ToolError, UnsupportedError
from escalade.ops.base.card import H200, Card
from escalade.ops.base.cards import A100, H100_PCIE
from tests.engine import confusion
from tests.engine.files import Contents

HERE = torch.device("cpu")
INPUTS = tuple(((batch, 64), InputFormat(torch.float32, "flat")) for batch in (1, 3))


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = compile(nn.Sequential(nn.Linear(64, 24), nn.ReLU()), torch.randn(1, 64), dtype="fp16")
    engine.plan(torch.randn(3, 64))
    return engine


@pytest.fixture(scope="module")
def path(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("carried") / "net.escalade"
    engine.save(path, kernels="sm_90a")
    return path


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> Any:
        raise AssertionError("there is no NVRTC here, and there are no headers")

    for name in ("_compile", "compiler_version", "cuda_headers"):
        monkeypatch.setattr(nvrtc, name, absent)
    monkeypatch.setattr(nvrtc, "_bundled", {})


@pytest.mark.usefixtures("no_compiler")
def test_plans_and_kernels_come_back_without_a_compiler(engine: Engine, path: pathlib.Path) -> None:
    graph, dtype, carried = read(path, HERE)
    nvrtc.add_bundled(carried.codes["sm_90a"])
    again = Engine(graph, dtype, HERE)
    for inputs in INPUTS:
        batch, form = inputs[0][0], {graph.inputs[0].name: inputs[1]}
        kept = carried.plan_for(H200, (inputs,))
        assert kept is not None and carried.plan_for(A100, (inputs,)) is None
        plan = again._plans.planner(again._plans.networks.first, H200, batch, form)(
            kept.in_pytorch, decided=kept.decided
        )
        assert (
            plan.programs == engine._plans.planner(engine._plans.networks.first, H200, batch, form)().programs
        )
        assert all("chosen before" in choice.why for choice in plan.chosen.values()) and plan.chosen
        for program in plan.programs:
            assert nvrtc.is_compiled(program, "sm_90a")
            assert nvrtc.compile_program(program, "sm_90a").resources.registers > 0
    x = torch.randn(2, 64)
    torch.testing.assert_close(load(path, device="cpu")(x), engine(x), rtol=0, atol=0)


@pytest.mark.usefixtures("no_compiler")
def test_bundled_kernels_survive_copies_and_moves(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Through copies and pickles, and on a GPU that an engine moves to after loading."""
    loaded = load(path, device="cpu")
    for again in (loaded, copy.copy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert [plan.card for plan in again._plans.artifacts.plans] == [H200.name] * 2
        assert again._plans.artifacts.codes == loaded._plans.artifacts.codes
    assert not nvrtc._bundled
    assert not load(path, device="cpu", kernels=False)._plans.artifacts.plans
    monkeypatch.setattr("escalade.engine.engine.require_device", lambda device: None)
    monkeypatch.setattr(Settings, "where", "cuda")
    for card, said in ((H200, False), (H100_PCIE, True)):
        monkeypatch.setattr(Card, "of", lambda place, card=card: card)
        monkeypatch.setattr(nvrtc, "_bundled", {})
        caplog.clear()
        loaded._apply(lambda tensor: tensor.to("meta"))
        assert nvrtc._bundled == loaded._plans.artifacts.codes["sm_90a"]
        assert (f"{path}: its plans are for NVIDIA H200" in caplog.text) == said
        loaded._settings = loaded._settings.on(HERE)


def test_plans_are_for_one_card_and_one_set_of_inputs(path: pathlib.Path) -> None:
    _, _, carried = read(path, HERE)
    ((shape, form),) = INPUTS[:1]
    assert carried.plan_for(H200, ((shape, form),)) is not None and not carried.explain_mismatch(H200)
    for other in (
        replace(H200, name="NVIDIA H100"),
        replace(H200, architecture="sm_100a"),
        replace(H200, multiprocessors=H200.multiprocessors - 1),
    ):
        assert carried.plan_for(other, ((shape, form),)) is None and carried.explain_mismatch(other)
    for inputs in (
        (((2, 64), form),),
        ((shape, replace(form, dtype=torch.float16)),),
        ((shape, replace(form, layout="nhwc")),),
        ((shape, form), (shape, form)),
    ):
        assert carried.plan_for(H200, inputs) is None


def test_a_loaded_engine_reports_the_sizes_it_serves(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    _, _, carried = read(path, HERE)
    served = carried.served(H200)
    assert served == ["1×64 float32 flat", "3×64 float32 flat"] and not carried.served(A100)
    loaded = load(path, device="twin")
    loaded(torch.randn(2, 64))  # not a plan of the file: its kernels are built
    (name,) = (entry.name for entry in loaded.graph.inputs)
    for shape, sentence in {
        (
            2,
            65,
        ): rf"{name} has shape \(2, 65\); this engine comes from a file, which serves \[batch, 64\] for batch "
        r"sizes >= 1\. Only compile",
        (64,): rf"without the batch dimension of \[batch, 64\]; add it with {name}.unsqueeze\(0\)",
    }.items():
        with pytest.raises(UnsupportedError, match=sentence):
            loaded(torch.randn(shape))

    def no_tool(*_: Any, **__: Any) -> None:
        raise ToolError("there is no compiler")

    monkeypatch.setattr("escalade.engine.plan.kernels.compile_plans", no_tool)
    with pytest.raises(ToolError, match="there is no compiler$"):  # the file has nothing for the twin
        loaded(torch.randn(5, 64))
    monkeypatch.setattr(AotArtifacts, "served", lambda self, card: served)
    with pytest.raises(
        ToolError, match="serves what its file has kernels for: inputs 1×64 float32 flat; 3×64"
    ):
        loaded(torch.randn(5, 64))


def test_a_mismatch_of_cards_is_explained(path: pathlib.Path) -> None:
    _, _, carried = read(path, HERE)
    assert carried.explain_mismatch(H200) == "" and AotArtifacts().explain_mismatch(A100) == ""
    assert "planned again, and kernels are compiled" in carried.explain_mismatch(A100)
    said = carried.explain_mismatch(H100_PCIE)
    assert "NVIDIA H200 (sm_90a, 132 SMs), but this GPU is NVIDIA H100 PCIe (sm_90a, 114" in said
    assert "kernels that are not in the file are compiled" in said


@pytest.mark.parametrize(
    ("kernels", "sentence"),
    [
        (True, "this engine runs on cpu; name architectures instead, such as kernels='sm_90a'"),
        ("twin", "the twin's kernels are built for this machine's CPU"),
        (7, "kernels=7: pass True, an architecture such as 'sm_90a'"),
        (b"sm_90a", "kernels=b'sm_90a': pass True, an architecture"),
        (("sm_90a", "sm_70"), "no card of architecture sm_70 .*sm_80"),
    ],
)
def test_unsavable_aot_data_is_reported(
    engine: Engine, tmp_path: pathlib.Path, kernels: Any, sentence: str
) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        engine.save(tmp_path / "no.escalade", kernels=kernels)
    fresh = Engine(engine.graph, "fp16", HERE)
    with pytest.raises(UnsupportedError, match="no plan to save kernels of yet"):
        fresh.save(tmp_path / "no.escalade", kernels="sm_90a")
    assert not list(tmp_path.iterdir())


def _rewritten(path: pathlib.Path, place: pathlib.Path, change: Any) -> pathlib.Path:
    """The file with other AOT data, and a matching checksum."""
    contents = Contents.of(path)
    carried = json.loads(contents.metadata["carried"])
    text = change(carried, contents.tensors)
    text = json.dumps(carried) if text is None else text
    sha256 = _digest(contents.metadata["graph"], contents.metadata["dtype"], contents.tensors, text)
    metadata = {**contents.metadata, "carried": text, "sha256": sha256}
    place.write_bytes(safetensors.torch.save(contents.tensors, metadata))
    return place


def _no_elf(carried: Any, tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if name.startswith("kernel."))
    tensors[name] = torch.zeros_like(tensors[name])


def _one_more(carried: Any, tensors: dict[str, torch.Tensor]) -> None:
    tensors["kernel.more"] = torch.zeros(3, dtype=torch.uint8)


CHANGES: list[tuple[Any, str]] = [
    (_no_elf, "is not for a GPU"),
    (_one_more, "does not match its list of sources"),
    (lambda carried, _: "[", "holds no valid network"),
    (lambda carried, _: "[]", "not an object with plans and codes"),
    (lambda carried, _: '{"plans": [], "plans": [], "codes": {}}', "keys are repeated"),
    (lambda carried, _: "[" * 100_000, "nested too deeply"),
    (lambda carried, _: carried.pop("plans") and None, "not an object with plans and codes"),
    (lambda carried, _: carried["plans"].append(3), "an object is expected"),
    (lambda carried, _: carried["plans"][0].update(architecture="../x"), "is not a GPU architecture"),
    (lambda carried, _: carried["plans"][0].update(card="\x1b[2J"), "is not a printable line"),
    (
        lambda carried, _: carried["plans"][0]["choices"].update(conv={"rung": 3}),
        "is not a rung with a config",
    ),
    (
        lambda carried, _: carried["codes"]["sm_90a"]["sources"].append("../../x"),
        "no machine code for the source",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), CHANGES)
def test_aot_data_is_checked(path: pathlib.Path, tmp_path: pathlib.Path, change: Any, sentence: str) -> None:
    with pytest.raises(FileError, match=sentence):
        load(_rewritten(path, tmp_path / "changed.escalade", change), device="cpu")


def test_confused_types_in_aot_data(path: pathlib.Path) -> None:
    """Every value replaced by others of all types: a ValueError, or data whose plans can be requested."""
    contents = Contents.of(path)
    text = contents.metadata["carried"]
    refused = 0
    for place in confusion.paths(json.loads(text)):
        for value in confusion.CONFUSED:
            changed = json.dumps(confusion.replaced_at(json.loads(text), place, value))
            try:
                carried = from_json(changed, contents.tensors)
            except ValueError as error:
                assert str(error)
                refused += 1
                continue
            kept = carried.plan_for(H200, INPUTS[:1])
            assert kept is None or kept.decided
            carried.explain_mismatch(A100)
    assert refused


def test_aot_data_is_part_of_the_checksum(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    contents = Contents.of(path)
    carried = contents.metadata["carried"].replace(H200.name, A100.name)
    changed = tmp_path / "changed.escalade"
    changed.write_bytes(safetensors.torch.save(contents.tensors, {**contents.metadata, "carried": carried}))
    with pytest.raises(FileError, match="is damaged"):
        load(changed, device="cpu")


def test_a_choice_that_there_is_not_is_made_again(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """AOT data of another version or an attacker: only a rung's own configs are accepted."""

    def change(carried: Any, _: Any) -> None:
        for plan in carried["plans"]:
            for key, choice in plan["choices"].items():
                plan["choices"][key] = {"rung": choice["rung"], "config": {"warps": -1}}

    graph, dtype, carried = read(_rewritten(path, tmp_path / "changed.escalade", change), HERE)
    kept = carried.plan_for(H200, INPUTS[:1])
    assert kept is not None
    engine = Engine(graph, dtype, HERE)
    planner = engine._plans.planner(
        engine._plans.networks.first, H200, 1, {graph.inputs[0].name: INPUTS[0][1]}
    )
    assert planner(kept.in_pytorch, decided=kept.decided).programs == planner().programs


def test_files_of_the_version_before_are_read(engine: Engine, tmp_path: pathlib.Path) -> None:
    engine.save(tmp_path / "now.escalade")
    contents = Contents.of(tmp_path / "now.escalade")
    (name,) = contents.graph["parameters"]
    x = torch.randn(2, 64)
    for version, added in (("5", "means"), ("4", "weights"), ("3", "parameters"), ("2", "parameters")):
        contents.graph.pop(added, None)
        contents.metadata["version"] = version
        (tmp_path / "before.escalade").write_bytes(contents.written())
        before = load(tmp_path / "before.escalade", device="cpu")
        for found in (before(x), before(**{name: x})):
            torch.testing.assert_close(found, engine(x), rtol=0, atol=0)
        if version != "5":
            with pytest.raises(UnsupportedError, match="it comes from a file of an earlier version"):
                before.load_state_dict({})
