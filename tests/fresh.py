"""Run programs in a fresh Python without the seconds that importing PyTorch takes each time.

They are forked from a process that has imported PyTorch only: nothing of Escalade, and nothing of the tests.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from functools import cache

ROOT = pathlib.Path(__file__).parent.parent
_SERVER = """
import json, os, runpy, sys, types
import torch

while line := sys.stdin.readline():
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        break
else:
    sys.exit()
job = json.loads(line)
os.environ.clear()
os.environ.update(job["environment"])
for stream, path in ((0, os.devnull), (1, job["output"]), (2, job["errors"])):
    os.dup2(os.open(path, os.O_RDWR), stream)
kind, *sys.argv = job["arguments"]
if kind == "-c":
    code, sys.argv[0] = sys.argv[0], "-c"
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
elif kind == "-m":
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.argv.insert(0, kind)
    sys.path[0] = os.path.dirname(kind)
    runpy.run_path(kind, run_name="__main__")
"""


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python` with these arguments (`-c CODE`, `-m MODULE` or a file) in the repository's folder until it ends."""
    server = _server()
    assert server.stdin and server.stdout
    with tempfile.TemporaryDirectory() as folder:
        texts = [pathlib.Path(folder, name) for name in ("output", "errors")]
        for text in texts:
            text.touch()
        job = {
            "arguments": arguments,
            "environment": {**os.environ, **environment},
            "output": str(texts[0]),
            "errors": str(texts[1]),
        }
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, status, *(text.read_text() for text in texts))


@cache
def _server() -> subprocess.Popen[str]:
    """It ends with this process, which closes its end of the pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
