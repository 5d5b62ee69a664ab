"""Registration of `torch.compile(backend="escalade")`.

PyTorch finds backends by entry points. A source checkout has no installed metadata, so this module provides it.
"""

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
"""Same entry point as in pyproject.toml."""
_FILES = {
    "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n",
    "entry_points.txt": f"[{BACKEND.group}]\n{BACKEND.name} = {BACKEND.value}\n",
}


class _SourceDistribution(metadata.Distribution):
    """Metadata of Escalade, as if it were installed."""

    def read_text(self, filename: str) -> str | None:
        return _FILES.get(filename)

    def locate_file(self, path: Any) -> pathlib.Path:
        return pathlib.Path(__file__).parent.parent / path


class MetadataFinder:
    """Last finder on `sys.meta_path`, so an installed Escalade takes precedence."""

    @staticmethod
    def find_spec(*_: Any) -> None:
        """Find no modules: this finder only provides metadata."""

    @staticmethod
    def find_distributions(
        context: metadata.DistributionFinder.Context | None = None,
    ) -> Iterable[metadata.Distribution]:
        wanted = None if context is None else context.name
        return [_SourceDistribution()] if wanted in (None, NAME) else []


def register_entry_point() -> None:
    """Make the backend known to PyTorch, including a PyTorch that has already listed its backends."""
    sys.meta_path.append(MetadataFinder)
    register = getattr(sys.modules.get("torch._dynamo"), "register_backend", None)
    if register is not None:
        with contextlib.suppress(AssertionError):  # already registered
            register(_backend, name=NAME)


def _backend(module: Any, example_inputs: Any, **options: Any) -> Any:
    """Import the backend on first use."""
    return BACKEND.load()(module, example_inputs, **options)
