"""Playback in a real browser: fall-backs, stalls, failures and the size of the buffer."""

from tests.web.browser import (
    MARKS,
    browser,
    running_server,
    server,
    visit,
    visit_with,
)

__all__ = ["browser", "running_server", "server", "visit", "visit_with"]

pytestmark = MARKS

NO_MSE = "delete window.MediaSource; delete window.ManagedMediaSource;"


def test_still_pictures_without_media_source(visit_with):
    visit = visit_with(script=NO_MSE)
    visit.page.click("#start")
    visit.wait_for_text("#notice", "cannot play H.264 video, so one picture of each chunk is shown")
    visit.wait("!still.hidden && still.width === 256")
    first = visit.page.evaluate("still.toDataURL()")
    visit.wait(f"still.toDataURL() !== {first!r}")
    assert visit.console_errors == []


def test_first_picture_alone_without_any_h264(visit_with):
    script = "MediaSource.isTypeSupported = () => false; delete window.VideoDecoder;"
    visit = visit_with(script=script)
    visit.page.click("#start")
    visit.wait_for_text("#notice", "only the first picture is shown")
    assert visit.page.is_visible("#poster")
    visit.wait("Number.parseInt(chunks.textContent) >= 3")
    assert visit.page.is_enabled("#save")
    assert visit.console_errors == []


def test_playback_survives_a_pause_of_the_stream(visit):
    visit.start()
    visit.server.script.chunk_s = 3.0
    visit.wait("chunks.textContent.includes('1 late')")
    visit.server.script.chunk_s = 0.05
    time = visit.time()
    visit.wait(f"video.currentTime > {time} + 2")


def test_playback_is_rebuilt_after_a_failure_of_the_player(visit):
    visit.start()
    visit.page.evaluate("video.dispatchEvent(new Event('error'))")
    visit.wait_for_text("#log", "Playback restarted")
    visit.wait("video.currentTime < 0.3")
    visit.wait("video.currentTime > 1.5")
    assert visit.page.is_visible("#video")


def test_buffer_stays_bounded_and_live(visit):
    """A server that ignores the lead sends 30 s of video in a few seconds."""
    visit.server.script.paced = False
    visit.server.script.chunk_s = 0.02
    visit.start()
    visit.wait("Number.parseInt(chunks.textContent) >= 60")
    assert visit.page.evaluate("video.buffered.end(video.buffered.length - 1)") > 30
    visit.wait("video.buffered.end(video.buffered.length - 1) - video.currentTime < 5")
    # Up to 10 s of the past are kept, and what came since the last look.
    visit.wait("video.currentTime - video.buffered.start(0) < 11", timeout_ms=2000)
