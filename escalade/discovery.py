"""How PyTorch finds `backend="escalade"`: by an entry point, which sources that nobody installed have in no file."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from escalade.version import VERSION

NAME = "escalade"
BACKEND = metadata.EntryPoint(NAME, "escalade.engine.backend:escalade_backend", "torch_dynamo_backends")
"""The entry point that pyproject.toml gives an installed package."""
_FILES = {
    "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n",
    "entry_points.txt": f"[{BACKEND.group}]\n{BACKEND.name} = {BACKEND.value}\n",
}


class _Sources(metadata.Distribution):
    """What an installed package would say of itself."""

    def read_text(self, filename: str) -> str | None:
        return _FILES.get(filename)

    def locate_file(self, path: Any) -> pathlib.Path:
        return pathlib.Path(__file__).parent.parent / path


class SourceFinder:
    """Stands behind all others that look for packages' metadata: those of an installed Escalade are found first."""

    @staticmethod
    def find_spec(*_: Any) -> None:
        """No module is found here."""

    @staticmethod
    def find_distributions(
        context: metadata.DistributionFinder.Context | None = None,
    ) -> Iterable[metadata.Distribution]:
        wanted = None if context is None else context.name
        return [_Sources()] if wanted in (None, NAME) else []


def be_found() -> None:
    """From here on PyTorch knows the backend, also if it has looked for backends before."""
    sys.meta_path.append(SourceFinder)
    register = getattr(sys.modules.get("torch._dynamo"), "register_backend", None)
    if register is not None:
        with contextlib.suppress(AssertionError):  # it has the name already
            register(_backend, name=NAME)


def _backend(module: Any, example_inputs: Any, **options: Any) -> Any:
    """The backend, which is imported when it is first used."""
    return BACKEND.load()(module, example_inputs, **options)
