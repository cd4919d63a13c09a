"""Walks are kept, saved, and never dropped without a question."""

import io
import re
from pathlib import Path

import av
import pytest

from tests.web.browser import FORWARD, MARKS, REST, browser, cameras, server, visit, visit_with
from vllm_omni.entrypoints.server import protocol

__all__ = ["browser", "server", "visit", "visit_with"]

pytestmark = MARKS


def downloaded(visit, press):
    """Presentation times, in pixel frames, of the file that pressing a button saves."""
    with visit.page.expect_download() as download:
        press()
    assert re.fullmatch(r"lingbot-world-[\d-]+\.mp4", download.value.suggested_filename)
    saved = Path(download.value.path()).read_bytes()
    with av.open(io.BytesIO(saved)) as video:
        return [frame.pts * frame.time_base * 16 for frame in video.decode(video=0)]


def resets(server):
    return [m for m in server.received if isinstance(m, protocol.SessionReset)]


@pytest.mark.parametrize("new_stream", [False, True])
def test_reset_restarts_the_world_and_keeps_both_walks(visit, new_stream):
    visit.server.script.new_stream_on_reset = new_stream
    visit.start()
    visit.wait("document.getElementById('video').currentTime > 3")
    visit.page.click("#setup-toggle")
    visit.page.click("summary")
    visit.page.fill("#seed", "7")
    visit.start_over()
    visit.wait("document.getElementById('video').currentTime < 0.9")
    visit.wait("document.getElementById('video').currentTime > 1")
    (reset,) = resets(visit.server)
    assert (reset.seed, reset.image_reference) == (7, None)
    visit.stop()
    visit.page.click("#save")
    lines = visit.page.locator("#walks li").all()
    assert len(lines) == 2
    second, first = (downloaded(visit, line.locator("button").click) for line in lines)
    for frames in (first, second):
        # Each file is one world alone: 9 + 12k pixel frames, counted from zero.
        assert len(frames) % 12 == 9
        assert frames == list(range(len(frames)))
    assert len(first) >= 3 * 16
    visit.page.click("#walks-no")
    assert not visit.page.is_visible("#walks-dialog")


def test_the_last_walk_is_offered_until_another_world_is_there_and_after(visit):
    visit.start()
    visit.stop()
    assert len(downloaded(visit, lambda: visit.page.click("#save"))) % 12 == 9
    # The next world is still on its way: the last walk is there at once, without a list.
    visit.server.script.chunk_s = 1.5
    visit.page.click("#start")
    visit.wait_for_text("#status", "First pictures")
    downloaded(visit, lambda: visit.page.click("#save"))
    visit.wait_for_text("#status", "Running")
    visit.page.click("#save")
    assert visit.page.locator("#walks li").count() == 2
    texts = visit.page.locator("#walks li span").all_inner_texts()
    assert all(re.fullmatch(r"Day, \d:\d\d, from \d\d:\d\d", text) for text in texts)


def test_start_over_asks_first(visit):
    visit.start()
    visit.page.click("#reset")
    assert "This walk ends" in visit.page.inner_text("#ask-text")
    # Keys are the dialog's now.
    visit.page.keyboard.press("KeyW")
    visit.page.click("#ask-no")
    visit.page.wait_for_timeout(200)
    assert resets(visit.server) == []
    assert cameras(visit.server) == []
    visit.start_over()
    assert len(resets(visit.server)) == 1


def test_escape_is_a_no(visit):
    visit.start()
    visit.page.click("#reset")
    visit.page.keyboard.press("Escape")
    assert not visit.page.is_visible("#ask")
    visit.page.wait_for_timeout(200)
    assert resets(visit.server) == []
    assert visit.page.inner_text("#status") == "Running"


def test_another_scene_during_a_walk_asks_and_then_starts_it(visit):
    visit.start()
    visit.page.click("#setup-toggle")
    visit.page.click('[data-scene="dusk"]')
    assert "Dusk" in visit.page.inner_text("#ask-text")
    visit.page.click("#ask-yes")
    visit.wait_for_text("#log", "Dusk starts over")
    (reset,) = resets(visit.server)
    assert reset.image_reference.image_url.startswith("data:image/png;base64,")
    assert "dusk" in reset.prompt
    assert not visit.page.is_visible("#setup")


def test_another_scene_while_waiting_in_line_asks_and_then_starts_it(visit):
    visit.server.script.queue_positions = (9, 8, 7, 6, 5, 4, 3, 2, 1)
    visit.page.click("#start")
    visit.wait_for_text("#status", "position 9")
    visit.page.click("#setup-toggle")
    visit.page.click('[data-scene="night"]')
    assert visit.page.inner_text("#ask-text") == "Leave the line?"
    visit.server.script.queue_positions = ()
    visit.page.click("#ask-yes")
    visit.wait_for_text("#status", "Running")
    assert "night" in visit.server.received[-1].prompt


def test_closing_the_tab_asks_while_a_walk_is_on(visit):
    leaves = "window.dispatchEvent(new Event('beforeunload', { cancelable: true }))"
    assert visit.page.evaluate(leaves)
    visit.start()
    assert not visit.page.evaluate(leaves)
    visit.stop()
    assert visit.page.evaluate(leaves)


def test_key_held_over_a_reset_moves_the_new_world(visit):
    visit.start()
    visit.page.keyboard.down("KeyW")
    visit.wait_until(lambda: cameras(visit.server) == [FORWARD])
    visit.page.evaluate("document.getElementById('reset').click()")
    # The dialog takes the keys, so what was held is released.
    visit.wait_until(lambda: cameras(visit.server) == [FORWARD, REST])
    visit.page.keyboard.up("KeyW")
    visit.page.click("#ask-yes")
    visit.page.keyboard.down("KeyW")
    visit.wait_for_text("#log", "starts over")
    visit.wait_until(lambda: cameras(visit.server)[-1] == FORWARD)
    visit.wait("document.getElementById('pose').textContent.includes('heading')")
    visit.page.keyboard.up("KeyW")
    visit.wait_until(lambda: cameras(visit.server)[-1] == REST)


def test_the_old_world_stays_on_the_screen_until_the_new_one_is_there(visit):
    visit.start()
    visit.server.script.chunk_s = 1.0
    visit.start_over()
    visible = "['poster', 'still', 'video'].filter((id) => !document.getElementById(id).hidden)"
    shown = []
    for _ in range(30):
        shown += visit.page.evaluate(visible)
        visit.page.wait_for_timeout(50)
    assert set(shown) <= {"video", "still"}
    assert len(shown) == 30
    visit.wait("video.currentTime > 0.2")
