"""The page on the real server: real worker process, real video, and a world drawn by arithmetic."""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import av
import pytest

from tests.helpers import drawn_world
from tests.helpers.server import RealServer, real_server
from tests.web.browser import BUILD, DESKTOP, MARKS, browser

__all__ = ["browser"]

pytestmark = MARKS

PATIENCE_MS = 40_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    home = drawn_world.write_home(tmp_path_factory.mktemp("serve"))
    with real_server(
        model=home / "model", deploy=home / "deploy.yaml", python_path=home / "package"
    ) as running:
        yield running


@pytest.fixture
def page(browser, server):
    context = browser.new_context(viewport=DESKTOP)
    context.set_default_timeout(PATIENCE_MS)
    opened = context.new_page()
    opened.errors = []
    opened.on("pageerror", lambda error: opened.errors.append(str(error)))
    opened.on("console", lambda m: opened.errors.append(m.text) if m.type == "error" else None)
    answer = opened.goto(server.address)
    assert answer.status == 200
    opened.wait_for_function("() => document.getElementById('width').value === '96'")
    yield opened
    context.close()


def test_walk_change_prompt_reset_save_and_stop(page):
    page.click('[data-scene="dusk"]')
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
    page.wait_for_function("() => log.textContent.includes('Dusk starts over')")
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


def test_killed_server_comes_back(page, server):
    page.click("#start")
    page.wait_for_function("() => video.currentTime > 0.5")
    server.kill()
    page.wait_for_selector("#alert >> text=The connection to the server was lost.")
    page.screenshot(path=BUILD / "web-real-error.png")
    server.start()
    server.wait_ready()
    page.wait_for_function("() => log.textContent.includes('The server is back')")
    page.wait_for_selector("#status[data-state=running]")
    known = "ERR_CONNECTION_REFUSED|ERR_CONNECTION_RESET|503"
    assert all(re.search(known, text) for text in page.errors), page.errors
