"""Headless Chromium, driven over two pipes by its own protocol, so that nothing must be installed for that."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import pathlib
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip
_COMMANDS, _ANSWERS = 3, 4
"""File descriptors of the protocol's pipes."""
_COMPLAINTS = ("Runtime.exceptionThrown", "Log.entryAdded")


class Browser:
    """One page. Its console errors and network requests are recorded."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._read = commands, answers, b""
        self._number = 0
        self._session = ""
        self._waiting: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the browser's answer to a command."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._commands, json.dumps(asked).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("id") == self._number:
                assert "error" not in said, f"{method}: {said['error']}"
                return dict(said["result"])

    def open(self, path: pathlib.Path, *, width: int = 1280, dark: bool = False) -> None:
        """Load a file into a window of that width, in a theme."""
        self.look(width, dark)
        self.send("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._waiting):
            self._next()
        self._waiting.clear()

    def look(self, width: int, dark: bool = False) -> None:
        """Set another width, or the other theme."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=844,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[theme])

    def click(self, selector: str) -> None:
        """Move the mouse to the middle of the first element that a selector matches."""
        x, y = self.run(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)}); one.scrollIntoView({{ behavior: "
            "'instant', block: 'center', inline: 'center' }); const box = one.getBoundingClientRect(); "
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def run(self, script: str) -> Any:
        """Return the value of an expression on the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, **parameters: Any) -> bytes:
        return base64.b64decode(self.send("Page.captureScreenshot", **parameters)["data"])

    def print(self) -> bytes:
        """Return the page as PDF."""
        return base64.b64decode(self.send("Page.printToPDF", printBackground=True)["data"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            more = os.read(self._answers, 1 << 20)
            assert more, "the browser has ended"
            self._read += more
        text, _, self._read = self._read.partition(b"\0")
        said: dict[str, Any] = json.loads(text)
        method = said.get("method", "")
        if method in _COMPLAINTS or (
            method == "Runtime.consoleAPICalled" and said["params"]["type"] in ("error", "warning")
        ):
            self.complaints.append(json.dumps(said["params"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["params"]["request"]["url"])
        if method:
            self._waiting.append(said)
        return said


@contextmanager
def browser(folder: pathlib.Path) -> Iterator[Browser]:
    """A browser with an empty folder; the test is skipped if none is installed."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip("there is no Chromium here (Debian: apt install chromium)")
    for_browser, commands = _pipe()
    answers, from_browser = _pipe()
    process = os.posix_spawn(
        program, [program, *_OPTIONS, f"--user-data-dir={folder}"], os.environ,
        file_actions=[
            *((os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)),
            (os.POSIX_SPAWN_DUP2, for_browser, _COMMANDS),
            (os.POSIX_SPAWN_DUP2, from_browser, _ANSWERS),
        ],
    )  # fmt: skip
    os.close(for_browser)
    os.close(from_browser)
    try:
        yield Browser(commands, answers)
    finally:
        os.close(commands)
        os.kill(process, signal.SIGTERM)
        os.waitpid(process, 0)
        os.close(answers)


def _pipe() -> tuple[int, int]:
    """Both ends, with descriptors above those of the protocol."""
    ends = os.pipe()
    above = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _ANSWERS + 1) for end in ends]
    for end in ends:
        os.close(end)
    return above[0], above[1]
