"""Headless Chromium, driven by the WebDriver protocol."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from support.busy import busyness
from support.ports import free_ports

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key that the standard gives to references
CALL_S = 30.0 * busyness()
_KEYS = {"Escape": "\ue00c", "ArrowDown": "\ue015", "ArrowUp": "\ue013", "Home": "\ue011", "ArrowRight": "\ue014"}


class Browser:
    """One window."""

    def __init__(self, session: httpx.Client) -> None:
        self._session = session

    def open(self, url: str) -> None:
        self._post("url", url=url)

    def resize(self, width: int) -> None:
        self._post("window/rect", width=width, height=950)

    def run(self, script: str, *arguments: Any) -> Any:
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
        origin = {_ELEMENT: self.find(css)}
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": origin}
        self._post("actions", actions=[{"type": "pointer", "id": "mouse", "actions": [move]}])

    def press(self, *keys: str) -> None:
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

    def as_phone(self, width: int = 390, height: int = 844) -> None:
        """A phone's screen, touched with fingers; windows are 500 pixels wide at least."""
        for name, values in (
            ("DeviceMetricsOverride", {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": True}),
            ("TouchEmulationEnabled", {"enabled": True}),
        ):
            self._post("goog/cdp/execute", cmd=f"Emulation.set{name}", params=values)

    def tap(self, css: str) -> None:
        """With a finger, at the middle of the first such element, which is scrolled into view."""
        script = (
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]"
        )
        x, y = self.run(script, css)
        for kind, points in (("touchStart", [{"x": x, "y": y}]), ("touchEnd", [])):
            params = {"type": kind, "touchPoints": points}
            self._post("goog/cdp/execute", cmd="Input.dispatchTouchEvent", params=params)

    def problems(self) -> list[str]:
        lines = self._post("se/log", type="browser")
        return [line["message"] for line in lines if line["level"] in ("SEVERE", "ERROR")]

    def _post(self, command: str, **body: Any) -> Any:
        response = self._session.post(command, json=body)
        value = response.json()["value"]
        if response.status_code != 200:
            raise AssertionError(f"{command}: {value['error']}: {value['message'].splitlines()[0]}")
        return value


@contextmanager
def open_browser() -> Iterator[Browser]:
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
    (port,) = free_ports(1)
    process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        transport = httpx.HTTPTransport(retries=8)  # connects again for half a minute while the driver starts
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/", timeout=CALL_S, transport=transport) as client:
            # Containers have neither the namespaces of Chromium's sandbox nor much shared memory.
            arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": {"binary": chromium, "args": arguments},
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            request = {"capabilities": {"alwaysMatch": wanted}}
            answer = client.post("session", json=request, timeout=2 * CALL_S).json()["value"]
            if "sessionId" not in answer:
                raise AssertionError(f"Chromium did not start: {answer}")
            own = f"session/{answer['sessionId']}"
            try:
                with httpx.Client(base_url=f"{client.base_url}{own}/", timeout=CALL_S) as session:
                    window = Browser(session)
                    window.resize(1500)
                    yield window
            finally:
                client.delete(own).raise_for_status()  # without it Chromium outlives its driver
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
