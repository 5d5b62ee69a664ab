"""The choice of NVRTC: by path, or PyTorch's copy, and no newer than the driver."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from escalade.device import nvrtc, nvrtc_library
from escalade.errors import CompileError, ToolError

OTHER = r"""
extern "C" {
int nvrtcVersion(int* major, int* minor) { *major = 12; *minor = 8; return 0; }
const char* nvrtcGetErrorString(int) { return "the NVRTC of another package"; }
int nvrtcCreateProgram(void**, const char*, const char*, int, const char* const*, const char* const*) { return 0; }
int nvrtcCompileProgram(void*, int, const char* const*) { return 5; }
int nvrtcGetProgramLogSize(void*, unsigned long* size) { *size = 0; return 0; }
int nvrtcGetProgramLog(void*, char*) { return 0; }
int nvrtcDestroyProgram(void**) { return 0; }
}
"""
COMPILING = """
import ctypes, os, sys
ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW | os.RTLD_GLOBAL)
from escalade.device.nvrtc import compile_source
code, _ = compile_source('extern "C" __global__ void probe() {}', "probe.cu", "sm_90a")
assert code[:4] == bytes([127]) + b"ELF"
"""


def test_an_nvrtc_that_another_package_has_loaded_is_not_used(tmp_path: pathlib.Path) -> None:
    """PyTorch built for CUDA 12 loads its own."""
    other = tmp_path / "libnvrtc.so.12"
    made = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(other), "-Wl,-soname,libnvrtc.so.12"]
    subprocess.run(made, input=OTHER, text=True, check=True)
    ran = subprocess.run([sys.executable, "-c", COMPILING, str(other)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.fixture
def two(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, pathlib.Path]:
    """NVRTC 12 and 13 as installed from wheels, with their headers."""
    folders = {12: ("cuda_nvrtc", "cuda_runtime"), 13: ("cu13", "cu13")}
    for major, (libraries, headers) in folders.items():
        for name in (f"libnvrtc.so.{major}", f"libnvrtc-builtins.so.{major}.0", f"libnvrtc.alt.so.{major}"):
            (tmp_path / libraries / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / libraries / "lib" / name).touch()
        (tmp_path / headers / "include").mkdir(parents=True)
        (tmp_path / headers / "include" / "cuda_fp16.h").touch()
        version = f"#define CUDART_VERSION  {major}080\n"
        (tmp_path / headers / "include" / "cuda_runtime_api.h").write_text(version)
    for module in (nvrtc, nvrtc_library):
        monkeypatch.setattr(module, "nvidia_folders", lambda: [tmp_path])
        monkeypatch.setattr(module, "toolkits", list[pathlib.Path])
    return {major: tmp_path / headers / "include" for major, (_, headers) in folders.items()}


@pytest.mark.parametrize(
    ("driver", "expected"), [(None, [13, 12]), ((13, 0), [13, 12]), ((12, 4), [12, 13]), ((14, 1), [13, 12])]
)
def test_the_newest_that_the_driver_accepts_comes_first_with_its_headers(
    driver: tuple[int, int] | None,
    expected: list[int],
    two: dict[int, pathlib.Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvrtc_library, "driver_cuda_version", lambda: driver)
    assert [nvrtc_library.major_of(path) for path in nvrtc_library.installed_libraries()] == expected
    assert nvrtc.cuda_headers.__wrapped__() == two[expected[0]]


def test_options_that_a_version_does_not_have_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = nvrtc_library.library()
    assert real.accepts("-std=c++17") and not real.accepts("-nosuch")
    with pytest.raises(CompileError, match="NVRTC_ERROR_INVALID_OPTION"):
        real.compile("", "empty.cu", ["-nosuch"])
    monkeypatch.setitem(nvrtc._OPTIONS, "nosuch", True)
    code, _ = nvrtc.compile_source('extern "C" __global__ void probe() {}', "probe.cu", "sm_90a")
    assert code[:4] == b"\x7fELF"


def test_without_nvrtc_the_error_gives_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        nvrtc_library, "installed_libraries", lambda: [pathlib.Path("/nowhere/libnvrtc.so.13")]
    )
    monkeypatch.setattr(nvrtc_library, "_MAJORS", ())
    with pytest.raises(ToolError, match=r"/nowhere/libnvrtc\.so\.13.*pip install nvidia-cuda-nvrtc"):
        nvrtc_library.library.__wrapped__()
