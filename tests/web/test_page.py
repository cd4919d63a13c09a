"""The page in a real browser against a scripted server with real video."""

import io
import re
from pathlib import Path

import av
import pytest

from tests.web.browser import (
    PHONE,
    browser,
    requires_chromium,
    running_server,
    server,
    visit,
    visit_with,
)
from vllm_omni.entrypoints.server import protocol

__all__ = ["browser", "running_server", "server", "visit", "visit_with"]

pytestmark = [
    pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.web, requires_chromium,
    pytest.mark.timing,
]  # fmt: skip

REST = {"translation": [0, 0, 0], "rotation": [0, 0, 0, 1]}
FORWARD = {"translation": [0, 0, 0.05], "rotation": [0, 0, 0, 1]}


def cameras(server):
    """Velocities that the server was sent, in order."""
    payloads = [i.event.multi_modal_data for i in server.interactions()]
    return [payload["camera"]["data"] for payload in payloads if payload]


def test_idle_page_is_complete_and_still(visit):
    visit.page.evaluate(
        """() => {
          window.shift = 0;
          window.shifted = [];
          new PerformanceObserver((list) => {
            for (const entry of list.getEntries()) {
              window.shift += entry.value;
              for (const { node } of entry.sources) window.shifted.push(node?.textContent);
            }
          }).observe({ type: "layout-shift", buffered: true });
        }"""
    )
    assert visit.page.inner_text("#status") == "Ready"
    assert visit.page.inner_text("#model") == "tiny-lingbot-world"
    visit.wait("document.getElementById('poster').naturalWidth > 0")
    visit.screenshot("web-idle")
    visit.start()
    visit.page.keyboard.down("KeyW")
    visit.page.wait_for_timeout(1500)
    visit.page.keyboard.up("KeyW")
    visit.page.click("#stop")
    visit.wait_for_text("#status", "Ready")
    assert visit.page.evaluate("window.shift") < 0.001, visit.page.evaluate("window.shifted")


def test_video_time_advances_over_chunks(visit):
    visit.start()
    # Nine pixel frames, then twelve and twelve: the fourth chunk starts at 33 / 16 s.
    visit.wait("document.getElementById('video').currentTime > 33 / 16")
    assert visit.page.inner_text("#status") == "Running"
    size = visit.page.evaluate("[video.videoWidth, video.videoHeight]")
    assert size == [256, 144]
    visit.wait_for_text("#rate", "of 16 fps")
    assert re.match(r"\d+\.\d\d s", visit.page.inner_text("#first"))
    start = visit.server.received[0]
    assert isinstance(start, protocol.SessionStart)
    assert (start.unbounded, start.queue, start.fps, start.seed) == (True, True, 16, 42)
    assert (start.width, start.height) == (256, 144)


def test_hold_and_release_a_key(visit):
    visit.start()
    visit.page.keyboard.down("KeyW")
    visit.wait_until(lambda: cameras(visit.server) == [FORWARD])
    assert "held" in visit.page.get_attribute('[data-key="KeyW"]', "class")
    visit.wait_for_text("#log", "camera-1 started")
    visit.page.keyboard.up("KeyW")
    visit.wait_until(lambda: cameras(visit.server) == [FORWARD, REST])
    # Control to pixel was measured for the first event.
    visit.wait_for_text("#delay", "ms")
    visit.screenshot("web-running")


@pytest.mark.parametrize(
    "leave",
    [
        "window.dispatchEvent(new Event('blur'))",
        "document.dispatchEvent(new Event('visibilitychange'))",
        "document.getElementById('prompt').focus()",
        "window.dispatchEvent(new KeyboardEvent('keyup', { key: 'Meta' }))",
    ],
)
def test_release_is_not_lost_when_the_page_loses_the_keys(visit, leave):
    visit.start()
    visit.page.keyboard.down("KeyW")
    visit.wait_until(lambda: cameras(visit.server) == [FORWARD])
    visit.page.evaluate(leave)
    visit.wait_until(lambda: cameras(visit.server) == [FORWARD, REST])


def test_refused_camera_event_is_sent_again(visit):
    visit.server.script.refuse_camera_times = 2
    visit.start()
    visit.page.keyboard.down("KeyD")
    visit.wait_until(lambda: len(cameras(visit.server)) == 3)
    right = {"translation": [0.05, 0, 0], "rotation": [0, 0, 0, 1]}
    assert cameras(visit.server) == [right] * 3
    assert visit.page.inner_text("#alert p") == "the queue is full"


def test_typing_does_not_steer(visit):
    visit.start()
    visit.page.fill("#next-prompt", "")
    visit.page.type("#next-prompt", "wasd ijkl")
    visit.page.keyboard.press("Escape")
    visit.page.keyboard.press("KeyS")
    visit.wait_until(lambda: len(cameras(visit.server)) == 2)
    assert [c["translation"] for c in cameras(visit.server)] == [[0, 0, -0.05], [0, 0, 0]]


def test_pads_steer_by_touch_and_by_keyboard(visit):
    visit.start()
    box = visit.page.locator('[data-key="KeyW"]').bounding_box()
    visit.page.mouse.move(box["x"] + 5, box["y"] + 5)
    visit.page.mouse.down()
    visit.wait_until(lambda: cameras(visit.server) == [FORWARD])
    # The finger slides off the button before it is lifted.
    visit.page.mouse.move(5, 5)
    visit.page.mouse.up()
    visit.wait_until(lambda: cameras(visit.server) == [FORWARD, REST])
    visit.page.focus('[data-key="KeyS"]')
    visit.page.keyboard.down("Space")
    visit.wait_until(lambda: len(cameras(visit.server)) == 3)
    visit.page.evaluate("document.activeElement.blur()")
    visit.wait_until(lambda: cameras(visit.server)[-1] == REST)


def test_gamepad_steers(visit):
    visit.start()
    visit.page.evaluate(
        """() => {
          window.pad = { connected: true, axes: [0, -1, 0, 0] };
          navigator.getGamepads = () => [window.pad];
          window.dispatchEvent(new Event("gamepadconnected"));
        }"""
    )
    visit.wait_until(lambda: cameras(visit.server) == [FORWARD])
    visit.page.evaluate("window.pad.axes = [0.1, 0, -0.05, 0]")
    visit.wait_until(lambda: cameras(visit.server) == [FORWARD, REST])
    visit.page.evaluate("window.pad.axes = [1, 0, 0, 0]")
    visit.wait_until(lambda: len(cameras(visit.server)) == 3)
    visit.page.evaluate("navigator.getGamepads = () => [null]")
    visit.wait_until(lambda: cameras(visit.server)[-1] == REST)


def test_prompt_is_queued_started_and_completed(visit):
    visit.start()
    visit.page.fill("#next-prompt", "It starts to rain.")
    visit.page.keyboard.press("Enter")
    for step in ("queued", "started", "completed"):
        visit.page.wait_for_selector(f'#steps .reached[data-step="{step}"]')
    (interaction,) = visit.server.interactions()
    assert interaction.event.prompt == "It starts to rain."
    assert interaction.transition_chunks == 3


def test_stop_and_start_again(visit):
    visit.start()
    visit.page.click("#stop")
    visit.wait_for_text("#status", "Ready")
    visit.wait_for_text("#log", "Stopped after")
    assert visit.page.is_disabled("#stop")
    assert not visit.page.is_visible("#alert")
    visit.start()
    assert visit.page.inner_text("#status") == "Running"


@pytest.mark.parametrize("new_stream", [False, True])
def test_reset_restarts_the_world_and_the_recording(visit, new_stream):
    visit.server.script.new_stream_on_reset = new_stream
    visit.start()
    visit.wait("document.getElementById('video').currentTime > 1")
    visit.page.fill("#seed", "7")
    visit.page.click("#reset")
    visit.wait_for_text("#log", "The world starts over")
    visit.wait("document.getElementById('video').currentTime < 0.9")
    visit.wait("document.getElementById('video').currentTime > 1")
    (reset,) = [m for m in visit.server.received if isinstance(m, protocol.SessionReset)]
    assert (reset.seed, reset.image_reference) == (7, None)
    visit.page.click("#stop")
    visit.wait_for_text("#status", "Ready")
    with visit.page.expect_download() as download:
        visit.page.click("#save")
    saved = Path(download.value.path()).read_bytes()
    with av.open(io.BytesIO(saved)) as video:
        frames = [frame.pts * frame.time_base * 16 for frame in video.decode(video=0)]
    # The file is the second world alone: 9 + 12k pixel frames, counted from zero.
    assert len(frames) % 12 == 9
    assert frames == list(range(len(frames)))


def test_key_held_over_a_reset_moves_the_new_world(visit):
    visit.start()
    visit.page.keyboard.down("KeyW")
    visit.wait_for_text("#log", "camera-1 started")
    visit.page.click("#reset")
    visit.wait_for_text("#log", "The world starts over")
    visit.wait_for_text("#log", "camera-2 started")
    assert cameras(visit.server) == [FORWARD, FORWARD]
    visit.page.keyboard.up("KeyW")
    visit.wait_until(lambda: cameras(visit.server)[-1] == REST)


def test_reset_to_another_picture_sends_it(visit):
    visit.start()
    visit.page.check('[value="harbour"]', force=True)
    visit.page.click("#reset")
    visit.wait_for_text("#log", "The world starts over")
    (reset,) = [m for m in visit.server.received if isinstance(m, protocol.SessionReset)]
    assert reset.image_reference.image_url.startswith("data:image/png;base64,")
    assert reset.prompt == visit.page.input_value("#prompt")
    assert "harbour" in reset.prompt


def test_queue_position_is_shown(visit):
    visit.server.script.queue_positions = (2, 1)
    visit.page.click("#start")
    visit.wait_for_text("#status", "Waiting in line, position 2")
    visit.wait_for_text("#queue", "2 in line")
    visit.wait_for_text("#queue", "1 you are next")
    visit.wait_for_text("#status", "Running")
    visit.wait("!/\\d/.test(queue.textContent)")


def test_dropped_file_that_is_no_picture_shows_the_servers_words(visit):
    visit.page.evaluate(
        """() => {
          const data = new DataTransfer();
          data.items.add(new File(["not a picture"], "notes.txt", { type: "text/plain" }));
          const options = { dataTransfer: data, bubbles: true, cancelable: true };
          document.getElementById("stage").dispatchEvent(new DragEvent("drop", options));
        }"""
    )
    assert visit.page.inner_text("#own-name") == "notes.txt"
    visit.wait_for_text("#notice", "cannot show notes.txt")
    visit.page.click("#start")
    visit.wait_for_text("#alert p", "cannot be decoded as a picture")
    visit.wait_for_text("#status", "Not running")
    assert visit.page.inner_text("#log").count("cannot be decoded") == 1
    assert visit.page.inner_text("#reconnect") == "Try again"
    visit.screenshot("web-refused")
    visit.page.check('[value="road"]', force=True)
    visit.page.click("#reconnect")
    visit.wait_for_text("#status", "Running")
    assert not visit.page.is_visible("#alert")


def test_large_picture_is_made_to_fit(visit):
    visit.page.evaluate(
        """async () => {
          const canvas = new OffscreenCanvas(3000, 2000);
          const context = canvas.getContext("2d");
          for (let i = 0; i < 60000; i += 1) {
            context.fillStyle = `hsl(${Math.random() * 360} 90% 50%)`;
            context.fillRect(Math.random() * 3000, Math.random() * 2000, 9, 9);
          }
          const blob = await canvas.convertToBlob({ type: "image/png" });
          const data = new DataTransfer();
          data.items.add(new File([blob], "large.png", { type: "image/png" }));
          document.getElementById("file").files = data.files;
          document.getElementById("file").dispatchEvent(new Event("change", { bubbles: true }));
        }"""
    )
    visit.start()
    sent = visit.server.received[0].image_reference.image_url
    assert sent.startswith("data:image/jpeg;base64,")
    assert len(sent) < 4_000_000


def test_server_is_killed_and_comes_back(visit_with, server):
    visit = visit_with()
    visit.start()
    server.stop()
    try:
        visit.wait_for_text("#alert p", "The connection to the server was lost.")
        visit.wait_for_text("#status", "No connection")
        assert visit.page.is_visible("#reconnect")
        visit.screenshot("web-error")
    finally:
        server.start()
    visit.wait_for_text("#log", "The server is back")
    visit.wait_for_text("#status", "Running")
    assert not visit.page.is_visible("#alert")
    assert len([m for m in server.received if isinstance(m, protocol.SessionStart)]) == 2
    # The browser itself reports the requests that found nobody; the page has no errors of its own.
    assert all("ERR_CONNECTION_REFUSED" in text for text in visit.console_errors)


def test_reconnect_button_starts_at_once(visit_with, server):
    visit = visit_with()
    server.stop()
    try:
        visit.page.click("#start")
        visit.wait_for_text("#alert p", "Looking for it again")
    finally:
        server.start()
    visit.page.click("#reconnect")
    visit.wait_for_text("#status", "Running")


def test_keyboard_alone_starts_and_stops(visit):
    visit.page.keyboard.press("Tab")
    for _ in range(40):
        if visit.page.evaluate("document.activeElement.id") == "start":
            break
        visit.page.keyboard.press("Tab")
    visit.page.keyboard.press("Enter")
    visit.wait_for_text("#status", "Running")
    # The picture has the focus now, so that keys steer; the next stop of Tab is the transport.
    assert visit.page.evaluate("document.activeElement.id") == "stage"
    visit.page.keyboard.press("Tab")
    assert visit.page.evaluate("document.activeElement.id") == "stop"
    visit.page.keyboard.press("Enter")
    visit.wait_for_text("#status", "Ready")


def test_invalid_size_is_not_sent(visit):
    visit.page.fill("#width", "250")
    visit.page.click("#start")
    visit.page.wait_for_timeout(200)
    assert visit.server.received == []
    assert visit.page.inner_text("#status") == "Ready"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_fits_a_small_laptop(visit_with, scheme):
    visit = visit_with(color_scheme=scheme)
    visit.start()
    visit.page.keyboard.down("KeyW")
    visit.page.wait_for_timeout(1500)
    visit.screenshot(f"web-{scheme}")
    overflow = visit.page.evaluate(
        """() => [document.documentElement.scrollHeight - innerHeight,
                  document.documentElement.scrollWidth - innerWidth,
                  ...[...document.querySelectorAll(".panel, .scene")]
                    .map((box) => box.scrollHeight - box.clientHeight)]"""
    )
    assert max(overflow) <= 0


def test_phone_needs_no_sideways_scrolling(visit_with):
    visit = visit_with(viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=2)
    visit.page.tap("#start")
    visit.wait("video.currentTime > 0.2")
    visit.screenshot("web-phone")
    assert visit.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    pads = visit.page.locator(".pad").all()
    assert all(pad.bounding_box()["y"] < PHONE["height"] - 150 for pad in pads)
