"""The page on the real server: tiny checkpoint, real worker process, real video."""

import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import av
import pytest

from tests.helpers.tiny import tiny_checkpoint_dir
from tests.web.browser import BUILD, DESKTOP, browser, requires_chromium

__all__ = ["browser"]

pytestmark = [
    pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.web, requires_chromium,
    pytest.mark.timing,
]  # fmt: skip

CONFIG = Path("benchmarks/lingbot_world/configs/cpu_tiny.yaml")
START_S = 90
PATIENCE_MS = 40_000


class RealServer:
    """`vllm-omni serve` in a process group of its own."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self._log = log
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start and wait until it is ready."""
        command = [
            sys.executable, "-c", "from vllm_omni.entrypoints.cli.main import main; main()",
            "serve", str(tiny_checkpoint_dir()), "--omni", "--deploy-config", str(CONFIG),
            "--host", "127.0.0.1", "--port", str(self.port),
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while not self._ready():
            assert self._process.poll() is None, self._log.read_text()[-2000:]
            assert time.monotonic() < deadline, self._log.read_text()[-2000:]
            time.sleep(0.2)

    def kill(self) -> None:
        """End all its processes at once, as an out-of-memory killer does."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "health", timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, ConnectionError):
            return False


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    server = RealServer(tmp_path_factory.mktemp("serve") / "log")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def page(browser, real_server):
    context = browser.new_context(viewport=DESKTOP)
    context.set_default_timeout(PATIENCE_MS)
    opened = context.new_page()
    opened.errors = []
    opened.on("pageerror", lambda error: opened.errors.append(str(error)))
    opened.on("console", lambda m: opened.errors.append(m.text) if m.type == "error" else None)
    answer = opened.goto(real_server.url)
    assert answer.status == 200
    opened.wait_for_function("() => document.getElementById('width').value === '96'")
    yield opened
    context.close()


def test_walk_change_prompt_reset_save_and_stop(page):
    page.click('[data-scene="harbour"]')
    page.wait_for_function("() => video.currentTime > 33 / 16")
    page.keyboard.down("KeyW")
    assert page.inner_text("#pose") == "on its way"
    page.wait_for_function("() => pose.textContent.includes('heading')")
    page.keyboard.up("KeyW")
    page.wait_for_function("() => pose.textContent.includes('heading')")
    page.fill("#next-prompt", "It starts to rain.")
    page.keyboard.press("Enter")
    for step in ("queued", "started", "completed"):
        page.wait_for_selector(f'#steps .reached[data-step="{step}"]')
    page.screenshot(path=BUILD / "web-real-running.png")
    page.click("#reset")
    page.click("#ask-yes")
    page.wait_for_function("() => log.textContent.includes('Harbour starts over')")
    page.wait_for_function("() => video.currentTime > 0.5 && video.currentTime < 3")
    page.click("#stop")
    page.wait_for_selector("#status[data-state=idle]")
    page.click("#save")
    for button in page.locator("#walks button").all():
        with page.expect_download() as download:
            button.click()
        with av.open(io.BytesIO(Path(download.value.path()).read_bytes())) as video:
            times = [frame.pts * frame.time_base * 16 for frame in video.decode(video=0)]
        assert times == list(range(len(times)))
        assert len(times) % 12 == 9
    assert page.errors == []


def test_dropped_file_is_refused_in_words(page):
    page.set_input_files(
        "#file", {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"not a picture"}
    )
    page.fill("#prompt", "Notes.")
    page.click("#start")
    page.wait_for_selector("#alert")
    assert "The server cannot use this picture." in page.inner_text("#alert")
    assert "is damaged or of an unknown format" in page.evaluate("log.textContent")
    assert page.errors == []


def test_a_size_that_does_not_fit_is_answered_by_one_that_does(page):
    page.click("summary")
    page.fill("#width", "832")
    page.fill("#height", "480")
    page.click("#start")
    page.wait_for_selector("#alert >> text=This server has room for 96 x 64.")
    page.click("#again")
    page.wait_for_function("() => video.currentTime > 0.5 && video.videoWidth === 96")
    assert page.errors == []


def test_killed_server_comes_back(page, real_server):
    page.click("#start")
    page.wait_for_function("() => video.currentTime > 0.5")
    real_server.kill()
    page.wait_for_selector("#alert >> text=The connection to the server was lost.")
    page.screenshot(path=BUILD / "web-real-error.png")
    real_server.start()
    page.wait_for_function("() => log.textContent.includes('The server is back')")
    page.wait_for_selector("#status[data-state=running]")
    known = "ERR_CONNECTION_REFUSED|ERR_CONNECTION_RESET|503"
    assert all(re.search(known, text) for text in page.errors), page.errors
