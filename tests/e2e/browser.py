"""A headless Chromium, driven over WebDriver by plain HTTP: what a person sees and does on a page."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.nats_server import free_port

LIMIT_S = 20.0
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id, by the standard
KEYS = {"enter": "\ue007", "escape": "\ue00c", "shift": "\ue008"}


def missing() -> str:
    """What must be installed before; empty: nothing."""
    names = {
        "chromium": ("chromium", "chromium-browser", "google-chrome"),
        "chromium-driver": ("chromedriver",),
    }
    absent = [package for package, found in names.items() if not any(map(shutil.which, found))]
    return f"not installed: {' and '.join(absent)} (Debian's packages)" if absent else ""


class BrowserError(Exception):
    """What the driver says."""


class Browser:
    def __init__(self, driver: str, width: int, height: int) -> None:
        self._driver = driver
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
        arguments = ["--headless=new", f"--window-size={width},{height}", "--disable-gpu", "--mute-audio"]
        arguments += ["--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage"]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")  # which Chromium refuses to root
        options = {"args": arguments, "binary": chromium}
        logs = {"goog:loggingPrefs": {"browser": "ALL", "performance": "OFF"}}
        always = {"browserName": "chrome", "goog:chromeOptions": options, **logs}
        self._session = ""
        self._session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": always}})["sessionId"]

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        base = f"/session/{self._session}" if self._session else ""
        data = None if method == "GET" else json.dumps({} if body is None else body).encode()
        request = urllib.request.Request(f"{self._driver}{base}{path}", data, method=method)
        request.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as error:
            raise BrowserError(json.load(error)["value"]["message"]) from None

    def go(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script's `return`."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def protocol(self, command: str, **parameters: Any) -> Any:
        """Of Chromium's DevTools."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def find(self, selector: str) -> str:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        return str(found[ELEMENT])

    def click(self, selector: str) -> None:
        self._call("POST", f"/element/{self.find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        self._call("POST", f"/element/{self.find(selector)}/value", {"text": text})

    def clear(self, selector: str) -> None:
        self._call("POST", f"/element/{self.find(selector)}/clear")

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def visible(self, selector: str) -> bool:
        script = "return document.querySelector(arguments[0])?.checkVisibility() ?? false"
        return bool(self.run(script, selector))

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def until(self, holds: Callable[[], Any], what: str) -> None:
        ends = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < ends, f"not within {LIMIT_S:g} s: {what}"
            time.sleep(0.02)

    def complaints(self) -> list[str]:
        """What the browser's console has, warnings and worse: a breach of the page's policy too."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [e["message"] for e in entries if e["level"] in ("WARNING", "SEVERE")]

    def size(self, width: int, height: int) -> None:
        self.protocol(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def scheme(self, name: str) -> None:
        """light or dark."""
        self.protocol(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}]
        )

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def close(self) -> None:
        self._call("DELETE", "")


@contextmanager
def browser(width: int = 1200, height: int = 800) -> Iterator[Browser]:
    port = free_port()
    command = ["chromedriver", f"--port={port}", "--log-level=SEVERE"]
    with tempfile.TemporaryDirectory() as home:
        driver = subprocess.Popen(command, env={**os.environ, "HOME": home})
        try:
            url = f"http://127.0.0.1:{port}"
            _await(url)
            made = Browser(url, width, height)
            try:
                yield made
            finally:
                made.close()
        finally:
            driver.terminate()
            driver.wait(LIMIT_S)


def _await(url: str) -> None:
    ends = time.monotonic() + LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/status", timeout=1):
                return
        except OSError:
            assert time.monotonic() < ends, "chromedriver does not answer"
            time.sleep(0.05)
