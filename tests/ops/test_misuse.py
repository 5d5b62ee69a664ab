"""Every public operator with one invalid argument: the error is a sentence of Escalade's, not a traceback."""

from __future__ import annotations

import inspect

import pytest

from escalade import ops
from escalade.device.run import Executable
from escalade.errors import EscaladeError, UnsupportedError
from tests.ops.misuse import RIGHT, calls


class Reached(EscaladeError):
    """A call passed validation, and would be compiled now."""


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise Reached

    monkeypatch.setattr(Executable, "__init__", stop)


def test_every_public_operator_has_a_right_call() -> None:
    """The reported error is the planted one, and nothing else."""
    functions = {name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))} - {"operation"}
    assert functions == RIGHT.keys()
    for name, right in RIGHT.items():
        with pytest.raises(Reached):
            getattr(ops, name)(**right)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_wrong_is_said_in_a_sentence(name: str) -> None:
    said, others = set(), []
    for label, call in calls(name):
        try:
            call()
        except Reached:
            continue
        except UnsupportedError as error:
            said.add(str(error))
        except Exception as error:
            others.append(f"{label}: {type(error).__name__}: {error}")
    assert not others and len(said) > 3
    assert not [text for text in said if "\n" in text or "escalade::" in text]
