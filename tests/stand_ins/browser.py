"""A real Chromium, driven over the pipe of its DevTools protocol: no package, no port.

Source: https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from tempfile import TemporaryDirectory
from typing import Any, Self

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--remote-debugging-pipe",
)  # fmt: skip
SECONDS = 60.0


class Browser:
    """A new tab and profile when entered. requests: what it asked for. messages: errors."""

    def __init__(self) -> None:
        assert PROGRAM is not None
        # a short name: the browser's socket stands in it, and a socket's address is short
        self._folder = TemporaryDirectory(prefix="planner-", ignore_cleanup_errors=True)
        theirs, self._out = os.pipe()
        self._in, answers = os.pipe()
        # the browser reads commands from descriptor 3 and writes answers to 4
        words = [PROGRAM, *OPTIONS, f"--user-data-dir={self._folder.name}/data", "about:blank"]
        script = f'exec "$@" 3<&{theirs} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *words],
            env={**os.environ, "TMPDIR": self._folder.name},
            pass_fds=(theirs, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(answers)
        self._waiting = b""
        self._number = 0
        self._session: str | None = None
        self._profile: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._profile = self._call("Target.createBrowserContext")
        tab = self._call("Target.createTarget", url="about:blank", **self._profile)
        self._session = self._call("Target.attachToTarget", flatten=True, **tab)["sessionId"]
        self.requests: list[str] = []
        self.messages: list[str] = []
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        self._call("Target.disposeBrowserContext", **self._profile)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def look(self, *, width: int = 1440, height: int = 1000, dark: bool = False) -> None:
        """The window's size and the scheme of colours that its user prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Goes there; `wait` for what is to be seen."""
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives; a promise is awaited. Raises AssertionError."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        found = self._call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until the expression is true. Raises AssertionError after SECONDS."""
        end = time.monotonic() + SECONDS
        # what is not there yet is no error
        asked = f"(() => {{ try {{ return Boolean({expression}); }} catch {{ return false; }} }})()"
        while not self.value(asked):
            assert time.monotonic() < end, f"never true: {expression}\n{self.messages}"
            time.sleep(0.05)

    def text(self, selector: str = "body") -> str:
        """What is read in an element."""
        return str(self.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    def picture(self, *, whole: bool = True) -> bytes:
        """The page as PNG. whole: beyond the window too."""
        clip: dict[str, Any] = {}
        if whole:
            size = self._call("Page.getLayoutMetrics")["cssContentSize"]
            part = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            clip = {"clip": part}
        shot = self._call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole, **clip
        )
        return base64.b64decode(shot["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        body: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            body["sessionId"] = self._session
        os.write(self._out, json.dumps(body).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._heard(message)

    def _heard(self, message: dict[str, Any]) -> None:
        method, body = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(body["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = body["exceptionDetails"]
            self.messages.append(str(details.get("exception", details).get("description", details)))
        elif method == "Log.entryAdded" and body["entry"]["level"] == "error":
            self.messages.append(f"{body['entry']['text']} {body['entry'].get('url', '')}")

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._waiting:
            ready, _, _ = select.select([self._in], [], [], SECONDS)
            assert ready, "the browser says nothing"
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "the browser has ended"
            self._waiting += chunk
        line, _, self._waiting = self._waiting.partition(b"\0")
        return json.loads(line)
