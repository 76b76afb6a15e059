"""Drive a headless Chromium over its DevTools protocol, as far as the report's tests need."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import websocket

__all__ = ["Page", "open_page"]

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)
_SECONDS = 60.0


class Page:
    """One page: send commands, and see what it logged and asked for."""

    def __init__(self, socket: websocket.WebSocket) -> None:
        self._socket = socket
        self._number = 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.events: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come first are noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        name, params = event["method"], event["params"]
        self.events.append(name)
        if name == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif name == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(json.dumps(params["args"]))
        elif name == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif name == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def run(self, code: str) -> Any:
        """Evaluate JavaScript and return its value."""
        answer = self.send(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, (code, answer["exceptionDetails"])
        return answer["result"].get("value")

    def settle(self) -> None:
        """Let the page finish two frames."""
        self.run("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def load(self, path: Path) -> None:
        self.events.clear()
        self.send("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + _SECONDS
        while "Page.loadEventFired" not in self.events and time.monotonic() < deadline:
            self.run("1")
        self.settle()

    def resize(self, width: int, height: int, *, mobile: bool = False, dark: bool = False) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2,
            mobile=mobile,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.settle()

    def move(self, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        mouse = "Input.dispatchMouseEvent"
        self.send(mouse, type="mousePressed", x=start[0], y=start[1], button="left", clickCount=1)
        for step in range(1, 6):
            x = start[0] + (end[0] - start[0]) * step / 5
            y = start[1] + (end[1] - start[1]) * step / 5
            self.send(mouse, type="mouseMoved", x=x, y=y, button="left", buttons=1)
        self.send(mouse, type="mouseReleased", x=end[0], y=end[1], button="left", clickCount=1)
        self.settle()

    def wheel(self, x: float, y: float, amount: float) -> None:
        """Turn the wheel with Ctrl held."""
        self.send(
            "Input.dispatchMouseEvent",
            type="mouseWheel",
            x=x,
            y=y,
            deltaX=0,
            deltaY=amount,
            modifiers=2,
        )
        self.settle()

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        if key == "Enter":
            text = {"text": "\r"}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)
        self.settle()

    def middle_of(self, selector: str) -> tuple[float, float]:
        """Scroll an element into view and return where its middle is."""
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return x, y

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        answer = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path


@contextlib.contextmanager
def open_page(profile: Path) -> Iterator[Page]:
    """A new page of a new browser, which is gone afterwards."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program is not None, (
        "this test needs the browser chromium, which is not installed: run `make setup` as root, "
        "or install Debian's package chromium"
    )
    process = subprocess.Popen(
        [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        socket = websocket.create_connection(
            _address(process, profile), timeout=_SECONDS, suppress_origin=True
        )
        with contextlib.closing(socket):
            yield Page(socket)
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=20)


def _address(process: subprocess.Popen[bytes], profile: Path) -> str:
    """Where the first page of the browser listens."""
    from urllib.request import ProxyHandler, build_opener

    opener = build_opener(ProxyHandler({}))
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, f"chromium ended with code {process.returncode}"
        with contextlib.suppress(OSError, ValueError, StopIteration):
            port = (profile / "DevToolsActivePort").read_text().split()[0]
            with opener.open(f"http://127.0.0.1:{port}/json/list", timeout=5) as answer:
                pages = json.load(answer)
            found = next(page for page in pages if page["type"] == "page")
            address: str = found["webSocketDebuggerUrl"]
            return address
        time.sleep(0.1)
    raise AssertionError(f"chromium did not open a DevTools port within {_SECONDS:.0f} s")
