"""Fixtures for tests that drive the page in the system's Chromium, headless."""

import atexit
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from tests.web.fake_server import FakeServer, Script

try:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright
except ModuleNotFoundError:
    sync_playwright = None

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--autoplay-policy=no-user-gesture-required",
]
BUILD = Path(__file__).resolve().parents[2] / "build"
DESKTOP = {"width": 1280, "height": 720}
PHONE = {"width": 390, "height": 844}
TIMEOUT_MS = 20_000


def _why_not() -> str | None:
    if sync_playwright is None:
        return "playwright for Python is not installed (pip install -e '.[web-test]')"
    if CHROMIUM is None:
        return "no chromium on this system (apt-get install chromium)"
    return None


MARKS = [
    pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.web, pytest.mark.timing,
    pytest.mark.skipif(_why_not() is not None, reason=_why_not() or ""),
]  # fmt: skip
"""Marks of every test in a browser."""
REST = {"translation": [0, 0, 0], "rotation": [0, 0, 0, 1]}
FORWARD = {"translation": [0, 0, 0.05], "rotation": [0, 0, 0, 1]}


def cameras(server: FakeServer) -> list[dict]:
    """Velocities that the server was sent, in order."""
    payloads = [i.event.multi_modal_data for i in server.interactions()]
    return [payload["camera"]["data"] for payload in payloads if payload]


@dataclass
class Visit:
    """One page and what went wrong on it."""

    page: "Page"
    server: FakeServer
    console_errors: list[str] = field(default_factory=list)
    foreign_requests: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Press Start and wait for moving pictures."""
        self.page.click("#start")
        self.wait_for_text("#status", "Running")
        self.wait("document.getElementById('video').currentTime > 0.2")

    def wait(self, expression: str, *, timeout_ms: int = TIMEOUT_MS) -> None:
        """Wait until an expression is true on the page."""
        self.page.wait_for_function(f"() => {{ return {expression}; }}", timeout=timeout_ms)

    def wait_for_text(self, selector: str, text: str) -> None:
        """Wait until an element shows a text."""
        self.wait(f"document.querySelector('{selector}').textContent.includes({text!r})")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something on the server's side."""
        for _ in range(TIMEOUT_MS // 50):
            if condition():
                return
            self.page.wait_for_timeout(50)
        raise AssertionError("the server did not see it in time")

    def stop(self) -> None:
        """Press Stop and wait for the end."""
        self.page.click("#stop")
        self.wait_for_text("#status", "Ready")

    def start_over(self) -> None:
        """Press Start over and agree."""
        self.page.click("#reset")
        self.page.click("#ask-yes")
        self.wait_for_text("#log", "starts over")

    def time(self) -> float:
        """Media time of the video."""
        return self.page.evaluate("document.getElementById('video').currentTime")

    def screenshot(self, name: str) -> None:
        """Keep a picture of the page as an artefact."""
        BUILD.mkdir(exist_ok=True)
        self.page.screenshot(path=BUILD / f"{name}.png")


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


@cache
def _running_server() -> FakeServer:
    server = FakeServer()
    server.start()
    atexit.register(server.stop)
    return server


@pytest.fixture
def server() -> FakeServer:
    """The server of all tests of a process, with a fresh script."""
    running = _running_server()
    running.script = Script()
    running.received.clear()
    running.requests.clear()
    return running


def open_visit(
    browser: "Browser", server: FakeServer, *, script: str = "", **options: object
) -> Visit:
    """Open the page; keywords go to the browser context, ``script`` runs before the page's own."""
    page = browser.new_context(**{"viewport": DESKTOP, **options}).new_page()
    if script:
        page.add_init_script(script)
    visit = Visit(page, server)
    _listen(visit)
    page.goto(server.url)
    return visit


@pytest.fixture
def visit_with(browser: "Browser", server: FakeServer) -> Iterator[Callable[..., Visit]]:
    """Open the page and wait for the server's defaults; arguments are those of `open_visit`."""
    visits = []

    def opened(**options: object) -> Visit:
        visit = open_visit(browser, server, **options)
        visits.append(visit)
        visit.wait("document.getElementById('width').value === '256'")
        return visit

    yield opened
    for visit in visits:
        visit.page.context.close()


@pytest.fixture
def visit(visit_with: Callable[..., Visit]) -> Iterator[Visit]:
    """A page that must neither complain nor talk to another host."""
    opened = visit_with()
    yield opened
    assert opened.console_errors == [], opened.console_errors
    assert opened.foreign_requests == []


def _listen(visit: Visit) -> None:
    def console(message: "ConsoleMessage") -> None:
        if message.type in {"error", "warning"}:
            visit.console_errors.append(message.text)

    def request(sent: "Request") -> None:
        if not sent.url.startswith((visit.server.url, "blob:", "data:")):
            visit.foreign_requests.append(sent.url)

    visit.page.on("console", console)
    visit.page.on("pageerror", lambda error: visit.console_errors.append(str(error)))
    visit.page.on("request", request)
