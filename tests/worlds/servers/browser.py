"""A page in headless Chromium, read over its debugging protocol."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from worlds.checks.missing_tools import skip_or_fail

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
ANSWER_LIMIT_S = 30.0


class Browser:
    """One tab of the browser.

    `complaints` has the page's errors, refused loads and log entries; `requests` has every address
    that the page requested.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._number = 0
        self._session: str | None = None
        self._num_loads = 0
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setFocusEmulationEnabled", enabled=True)

    def look(self, *, width: int = 1100, height: int = 900, is_dark: bool = False) -> None:
        """Set the window's size, and whether its user prefers dark colours."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def open(self, address: str) -> None:
        """Open another page, and wait until it is drawn."""
        before = self._num_loads
        self._call("Page.navigate", url=address)
        while self._num_loads == before:
            self._take()
        self.eval("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def eval(self, script: str) -> Any:
        """Return the value of an expression; a promise is awaited."""
        answer = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str, *, limit_s: float = 10.0) -> None:
        """Wait until an expression is true."""
        is_true = self.eval(
            f"new Promise(done => {{ const ends = Date.now() + {limit_s * 1000}; const look = () =>"
            f"{{ if ({script}) done(true); else if (Date.now() > ends) done(false);"
            "else setTimeout(look, 20) }; look(); })"
        )
        assert is_true, f"not within {limit_s:g} s: {script}\n{self.complaints}"

    def texts(self, selector: str) -> list[str]:
        return self.eval(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)"
        )

    def hover(self, selector: str, *, at: float = 0.5) -> None:
        """Point at an element. at: the place, as a fraction of its width from the left."""
        place = f"document.querySelector({json.dumps(selector)})"
        self.eval(f"{place}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        x, y, width, height = self.eval(
            f"(b => [b.x, b.y, b.width, b.height])({place}.getBoundingClientRect())"
        )
        for nudge in (1, 0):
            self._call(
                "Input.dispatchMouseEvent",
                type="mouseMoved", x=x + at * width + nudge, y=y + height / 2,
            )  # fmt: skip

    def key(self, name: str) -> None:
        """Press a key on the element that has the focus."""
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def click(self, selector: str) -> None:
        self.eval(f"document.querySelector({json.dumps(selector)}).click()")

    def choose(self, selector: str, value: str) -> None:
        """Fill in a field, or choose from a list."""
        self.eval(
            f"(e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('change')) }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )

    def picture(self, path: Path) -> None:
        """Save the whole page as a PNG."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self._call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def print_pdf(self) -> bytes:
        answer = self._call("Page.printToPDF", printBackground=False)
        return base64.b64decode(answer["data"])

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._connection.send(json.dumps(message))
        while (answer := self._take()).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _take(self) -> dict[str, Any]:
        """Return the next message; note it if it is an event."""
        message = json.loads(self._connection.recv(timeout=ANSWER_LIMIT_S))
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, found: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(found["exceptionDetails"])[:500])
        elif event == "Runtime.consoleAPICalled":
            self.complaints.append(f"console.{found['type']}: {found['args']}")
        elif event == "Log.entryAdded":
            self.complaints.append(found["entry"]["text"])
        elif event == "Page.loadEventFired":
            self._num_loads += 1
        elif event == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])


@contextmanager
def browser() -> Iterator[Browser]:
    """Run Chromium until the end of the block. Without it the test is skipped, or fails in CI."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        skip_or_fail("chromium-headless-shell is needed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
                "--disable-dev-shm-usage", "--hide-scrollbars",
                f"--user-data-dir={profile}", "about:blank",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            found = (re.search(r"listening on (ws://\S+)", line) for line in lines)
            address = next(match[1] for match in found if match)
            with connect(address, max_size=None) as connection:
                yield Browser(connection)
        finally:
            process.terminate()
            process.wait(10)
            process.stderr.close()
