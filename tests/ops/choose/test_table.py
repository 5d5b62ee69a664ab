"""Tables of measured choices."""

from __future__ import annotations

import importlib
import json
import pathlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from escalade import ops
from escalade.ops import OPERATIONS
from escalade.ops.base.card import H200, Card
from escalade.ops.choose import table
from escalade.ops.choose.choice import choose
from escalade.ops.choose.table import Entry, Table, TableError, add, key_of, read
from escalade.ops.conv2d import Conv2dProblem

PROBLEM = Conv2dProblem.parse("64to64_56_k3s1_b8", "fp16", "nhwc")
ENTRY = Entry("tuned", {"run": 4}, 12.5)


def test_a_table_comes_back_as_it_was_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "folder" / "card.json"
    assert add(path, key_of("conv2d", PROBLEM), ENTRY).entries == {key_of("conv2d", PROBLEM): ENTRY}
    found = read(path, "mine").find("conv2d", PROBLEM)
    assert found is not None and found.entry == ENTRY and "12.5" in found.why
    assert [entry.name for entry in path.parent.iterdir()] == ["card.json"]


def test_a_missing_table_is_empty_and_a_broken_one_is_named(tmp_path: pathlib.Path) -> None:
    assert read(tmp_path / "none.json", "mine").entries == {}
    broken = tmp_path / "broken.json"
    broken.write_text('{"conv2d x": {"rung": 1}}')
    with pytest.raises(TableError, match="broken.json, line 1, is not a table"):
        read(broken, "mine")


GOOD = '"a": {"rung": "tuned", "config": {}, "median_us": 1.5}'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{\n" + GOOD + ",\n", "card.json, line 3: .* invalid JSON"),
        ("[1]", "a JSON object of entries"),
        ("3", "a JSON object of entries"),
        ("", "line 1: .* invalid JSON"),
        ("\udcff", "utf-8"),
        ("{\n" + GOOD + ',\n"b": 3\n}', "line 3, .* the entry 'b' holds a number"),
        (
            "{\n" + GOOD + ',\n"b": {"rung": "x", "config": {}}\n}',
            "line 3, .* the entry 'b' lacks median_us",
        ),
        *(
            (
                "{\n" + GOOD + f',\n"b": {{"rung": {rung}, "config": {config}, "median_us": {us}}}\n}}',
                complaint,
            )
            for rung, config, us, complaint in (
                ("1", "{}", "1", "line 3, .* has 1 as its rung"),
                ('"x"', "[]", "1", r"line 3, .* has \[\] as its config"),
                ('"x"', '{"a": NaN}', "1", "line 3, .* as its config"),
                ('"x"', "{}", '"fast"', "line 3, .* has 'fast' as its median_us"),
                ('"x"', "{}", "NaN", "line 3, .* has nan as its median_us"),
                ('"x"', "{}", "1e999", "line 3, .* has inf as its median_us"),
                ('"x"', "{}", "-1", "line 3, .* has median_us -1,"),
                ('"x"', "{}", "true", "line 3, .* has True as its median_us"),
            )
        ),
        ("[" * 100_000, "not a table of measured choices"),
    ],
)
def test_what_is_wrong_with_a_table_is_named_and_nothing_is_overwritten(
    text: str, complaint: str, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "card.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    before = path.read_bytes()
    for use in (lambda: read(path, "mine"), lambda: add(path, "c", ENTRY)):
        with pytest.raises(TableError, match=complaint):
            use()
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["card.json"]


def test_what_a_later_version_wrote_is_read_and_kept(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "card.json"
    entry = {"rung": "tuned", "config": {}, "median_us": 1.5, "watts": [300, {"of": 700}]}
    path.write_text(json.dumps({"b": entry}))
    assert add(path, "a", ENTRY).entries == {"a": ENTRY, "b": Entry("tuned", {}, 1.5)}
    assert json.loads(path.read_text())["b"] == entry
    assert list(json.loads(path.read_text())) == ["a", "b"]


def test_writers_at_once_lose_nothing(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "card.json"
    together = threading.Barrier(4)

    def work(writer: int) -> None:
        together.wait()
        for number in range(10):
            add(path, f"{writer} {number}", ENTRY)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(read(path, "mine").entries) == 40
    assert [entry.name for entry in tmp_path.iterdir()] == ["card.json"]


@pytest.mark.parametrize(("batch", "found"), [(4, True), (16, True), (8, True), (3, False), (17, False)])
def test_near_batch_sizes_share_a_choice(batch: int, found: bool) -> None:
    filled = Table("mine", {key_of("conv2d", PROBLEM): ENTRY})
    other = Conv2dProblem.parse(f"64to64_56_k3s1_b{batch}", "fp16", "nhwc")
    assert (filled.find("conv2d", other) is not None) == found


def test_the_nearest_of_two_is_taken() -> None:
    entries = {
        key_of("conv2d", Conv2dProblem.parse(f"64to64_56_k3s1_b{batch}", "fp16", "nhwc")): Entry(
            f"r{batch}", {}, 1.0
        )
        for batch in (4, 8)
    }
    near = Conv2dProblem.parse("64to64_56_k3s1_b7", "fp16", "nhwc")
    found = Table("mine", entries).find("conv2d", near)
    assert found is not None and found.entry.rung == "r8"


def test_other_dtypes_layouts_and_operations_do_not_match() -> None:
    filled = Table("mine", {key_of("conv2d", PROBLEM): ENTRY})
    assert filled.find("conv2d", Conv2dProblem.parse(PROBLEM.name, "bf16", "nhwc")) is None
    assert filled.find("conv2d", Conv2dProblem.parse(PROBLEM.name, "fp16", "nchw")) is None
    assert filled.find("linear", PROBLEM) is None


def test_a_measured_choice_comes_before_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    by_rule = choose(OPERATIONS["conv2d"], PROBLEM, torch.device("cpu"))
    slower = by_rule.rung.configs(PROBLEM)[3]
    rung = by_rule.rung.name
    filled = Table("mine", {key_of("conv2d", PROBLEM): Entry(rung, slower.as_dict(), 3.0)})
    choosing = importlib.import_module("escalade.ops.choose.choice")  # the package's `choose` is the function
    monkeypatch.setattr(Card, "of", lambda device: H200)
    monkeypatch.setattr(choosing, "tables_for", lambda device: (filled,))
    choice = choose(OPERATIONS["conv2d"], PROBLEM, device)
    assert choice.config == slower and "measured" in choice.why
    assert (
        choose(OPERATIONS["conv2d"], PROBLEM, device, avoid=frozenset({f"conv2d/{rung}"})).rung.name != rung
    )
    # Rungs in a table of another version may be gone.
    monkeypatch.setattr(
        choosing, "tables_for", lambda device: (Table("old", {key_of("conv2d", PROBLEM): ENTRY}),)
    )
    assert choose(OPERATIONS["conv2d"], PROBLEM, device).config == by_rule.config


def test_a_table_that_changes_is_read_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`escalade tune` in another process replaces the file."""
    monkeypatch.setenv("ESCALADE_CACHE_DIR", str(tmp_path))
    key = key_of("conv2d", PROBLEM)
    for us in (3.0, 4.0):
        add(table.user_path(H200.name), key, replace(ENTRY, median_us=us))
        assert table.tables_for(H200)[0].entries[key].median_us == us


def test_every_shipped_table_can_be_read() -> None:
    for path in table.SHIPPED.glob("*.json"):
        assert read(path, "shipped").entries


def test_every_shipped_choice_is_still_on_offer() -> None:
    """Configs that a rung no longer has would silently be ignored."""
    for path in table.SHIPPED.glob("*.json"):
        for key, entry in read(path, "shipped").entries.items():
            operation, name, dtype, layout = key.split()
            asked = ops.operation(operation)
            problem = replace(asked.parse(name), dtype=dtype, layout=layout)
            rung = asked.ladder.rung(entry.rung)
            assert rung.supports(problem) is None, key
            assert entry.config in [config.as_dict() for config in rung.configs(problem)], key
