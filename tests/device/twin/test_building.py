"""The cache, error messages, and invalid launches."""

from __future__ import annotations

import pathlib

import pytest
import torch

from escalade import subprocesses
from escalade.device.cache import default_cache
from escalade.device.twin import build, building, toolchain
from escalade.device.twin.building import headers
from escalade.errors import CompileError, LaunchError, TwinError
from tests.device.twin.support import launch

COPY = r"""
extern "C" __global__ void copy(const float* x, float* y, int stride) {
    __shared__ float tile[32 * 32];
    const int i = threadIdx.x;
    tile[i * stride] = x[i * stride];
    __syncwarp();
    y[i] = tile[i * stride];
}
"""


def test_a_kernel_is_built_once() -> None:
    build(COPY, "copy")
    misses = default_cache().misses
    assert build(COPY, "copy") is build(COPY, "copy")
    assert default_cache().misses == misses


def test_a_changed_source_is_built_again() -> None:
    first = build(COPY, "copy")
    assert build(COPY.replace("32 * 32", "33 * 32"), "copy").path != first.path


def test_the_key_has_everything_that_a_library_depends_on(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change one input at a time; nothing is compiled."""

    class Keys:
        def file(self, key: str, suffix: str, make: object) -> pathlib.Path:
            self.last = key
            return tmp_path

    keys = Keys()
    monkeypatch.setattr(building, "default_cache", lambda: keys)
    monkeypatch.setattr(building, "KERNELS", tmp_path)
    monkeypatch.setattr(building, "_runtimes", {})

    source = f'#include "outer.cuh"\n{COPY}'

    def key(source: str = source, entry: str = "copy", name: str = "copy.cu", option: str = "") -> str:
        building.kernel_library(source, entry, name, **({option: True} if option else {}))
        return keys.last

    (tmp_path / "outer.cuh").write_text('#include "inner.cuh"\n')
    (tmp_path / "inner.cuh").write_text("// once\n")
    found = [key(), key(source=COPY), key(entry="other"), key(name="other.cu")]
    found += [key(option=option) for option in ("checks", "sanitize", "zeroed", "counts")]
    (tmp_path / "inner.cuh").write_text("// and again\n")
    found.append(key())
    (tmp_path / "outer.cuh").write_text('#include "inner.cuh"\n#define MORE\n')
    found.append(key())
    with monkeypatch.context() as changed:
        changed.setattr(building, "interface_key", lambda: "another runtime or compiler")
        found.append(key())
        building.runtime_library()
        runtimes = [keys.last]
    building.runtime_library()
    runtimes.append(keys.last)
    with monkeypatch.context() as changed:
        changed.setattr(toolchain, "runtime_options", lambda: ("-O3",))
        building.runtime_library()
        runtimes.append(keys.last)
    assert key() == found[-2], "nothing changed"
    # Without checks, unset variables do not concern g++.
    assert found[6] == found[0] and len(set(found)) == len(found) - 1
    assert len(set(runtimes)) == len(runtimes)


def test_a_header_of_nvidias_that_changes_is_read_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "nvidia_headers", lambda: tmp_path)
    source = f"#include <outer.h>\n{COPY}"
    (tmp_path / "outer.h").write_text("#include <inner.h>\n")
    (tmp_path / "inner.h").write_text("// once\n")
    before = headers(source)
    (tmp_path / "inner.h").write_text("// and again\n")
    assert headers(source) != before


def test_a_compile_error_has_the_compilers_words_and_the_sources_lines() -> None:
    with pytest.raises(
        CompileError, match=r"g\+\+ cannot compile copy of bad\.cu:[\s\S]*bad\.cu:5:.*nonsense"
    ):
        build(COPY.replace("x[i * stride]", "nonsense"), "copy", name="bad.cu")


def test_a_missing_entry_is_named() -> None:
    with pytest.raises(CompileError, match=r"kernel\.cu does not define other"):
        build(COPY, "other")


def test_without_a_compiler_the_sentence_gives_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain.compiler.cache_clear()
    monkeypatch.setattr(subprocesses, "find_program", lambda name: None)
    with pytest.raises(CompileError, match="install g\\+\\+ 12 or later"):
        toolchain.compiler()
    monkeypatch.undo()
    toolchain.compiler.cache_clear()


def test_impossible_launches() -> None:
    kernel = build(COPY, "copy")
    x, y = torch.zeros(1024), torch.zeros(32)
    with pytest.raises(TwinError, match="a block of 1056 threads; at most 1024"):
        launch(kernel, 1, 1056, (x, y, 1))
    with pytest.raises(TwinError, match="bytes of shared memory; a block can have 232448"):
        launch(kernel, 1, 32, (x, y, 1), shared_bytes=230000)
    with pytest.raises(TwinError, match="no whole number of clusters of 2"):
        launch(kernel, 3, 32, (x, y, 1), cluster=(2, 1, 1))
    with pytest.raises(LaunchError, match="empty grid"):
        launch(kernel, 0, 32, (x, y, 1))
    with pytest.raises(LaunchError, match="no __constant__ variable named weights"):
        kernel.constant("weights")
    with pytest.raises(LaunchError, match="build copy with checks=True"):
        kernel.unwritten(0, 1)


def test_the_stand_ins_have_the_functions_of_the_real_headers() -> None:
    def functions(path: pathlib.Path) -> set[str]:
        import re

        return set(
            re.findall(
                r"^(?:__device__ |\[\[noreturn\]\] )?(?:__forceinline__ |inline )?\w+ (\w+)\(",
                path.read_text(),
                re.M,
            )
        )

    for name in ("ptx.cuh", "hopper.cuh"):
        real = toolchain.KERNELS / "common" / name
        if real.is_file():
            missing = functions(real) - functions(toolchain.STAND_INS / "common" / name)
            assert not missing, f"{name}: the twin lacks {sorted(missing)}"
