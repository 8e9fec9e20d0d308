"""Headless Chromium by its driver's HTTP interface (W3C WebDriver): all that the viewer's tests need of a browser."""

from __future__ import annotations

import base64
import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key that the standard gives to references
_START_S, _CALL_S = 30.0, 30.0
_KEYS = {"Escape": "\ue00c", "ArrowDown": "\ue015", "ArrowUp": "\ue013", "Home": "\ue011", "ArrowRight": "\ue014"}


class Browser:
    """One window."""

    def __init__(self, session: httpx.Client) -> None:
        self._session = session

    def open(self, url: str) -> None:
        self._post("url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that ``script`` returns in the page."""
        return self._post("execute/sync", script=script, args=list(arguments))

    def find(self, css: str) -> str:
        return self._post("element", using="css selector", value=css)[_ELEMENT]

    def text(self, css: str) -> str:
        return self.run("return document.querySelector(arguments[0]).textContent", css)

    def count(self, css: str) -> int:
        return self.run("return document.querySelectorAll(arguments[0]).length", css)

    def click(self, css: str) -> None:
        self._post(f"element/{self.find(css)}/click")

    def hover(self, css: str) -> None:
        """Move the pointer to the middle of the element."""
        origin = {_ELEMENT: self.find(css)}
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": origin}
        self._post("actions", actions=[{"type": "pointer", "id": "mouse", "actions": [move]}])

    def move_to(self, x: float, y: float) -> None:
        """Move the pointer to a place in the window."""
        move = {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y), "origin": "viewport"}
        self._post("actions", actions=[{"type": "pointer", "id": "mouse", "actions": [move]}])

    def press(self, *keys: str) -> None:
        """Press and release each key on the focused element."""
        strokes = [{"type": kind, "value": _KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")]
        self._post("actions", actions=[{"type": "key", "id": "keyboard", "actions": strokes}])

    def choose(self, css: str, value: str) -> None:
        """Set a control and dispatch the event of a person's choice."""
        self.run(
            "const e = document.querySelector(arguments[0]); e.value = arguments[1];"
            "e.dispatchEvent(new Event(e.tagName === 'SELECT' ? 'change' : 'input', {bubbles: true}));",
            css,
            value,
        )

    def screenshot(self, path: Path) -> None:
        response = self._session.get("screenshot")
        path.write_bytes(base64.b64decode(response.json()["value"]))

    def problems(self) -> list[str]:
        """Errors and refused scripts of the page's console."""
        lines = self._post("se/log", type="browser")
        return [line["message"] for line in lines if line["level"] in ("SEVERE", "ERROR")]

    def _post(self, command: str, **body: Any) -> Any:
        response = self._session.post(command, json=body)
        value = response.json()["value"]
        if response.status_code != 200:
            raise AssertionError(f"{command}: {value['error']}: {value['message'].splitlines()[0]}")
        return value


@contextlib.contextmanager
def open_browser(width: int = 1500, height: int = 950) -> Iterator[Browser]:
    """A new browser with a profile of its own.

    Raises:
        RuntimeError: Chromium or its driver is not installed; says how to install them.
    """
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        raise RuntimeError(
            "the viewer is tested in a browser, and there is none on PATH; on Debian install it with: "
            "apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver"
        )
    process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{_port(process)}/", timeout=_CALL_S) as client:
            # Containers have neither the namespaces of Chromium's sandbox nor much shared memory.
            arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
                         f"--window-size={width},{height}"]  # fmt: skip
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": {"binary": chromium, "args": arguments},
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            answer = client.post("session", json={"capabilities": {"alwaysMatch": wanted}}, timeout=60.0).json()[
                "value"
            ]
            if "sessionId" not in answer:
                raise AssertionError(f"Chromium did not start: {answer}")
            own = f"session/{answer['sessionId']}"
            try:
                with httpx.Client(base_url=f"{client.base_url}{own}/", timeout=_CALL_S) as session:
                    yield Browser(session)
            finally:
                client.delete(own).raise_for_status()  # without it Chromium outlives its driver
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    deadline = time.monotonic() + _START_S
    for line in process.stdout:
        if found := re.search(r"started successfully on port (\d+)", line):
            return int(found[1])
        if time.monotonic() > deadline:
            break
    raise AssertionError("chromedriver did not say its port")
