"""The page in a real browser against a scripted server with real video: start, watch, stop."""

import re

import pytest

from tests.web.browser import MARKS, browser, server, visit, visit_with
from vllm_omni.diffusion.utils.scenes import SCENES
from vllm_omni.entrypoints.server import protocol

__all__ = ["browser", "server", "visit", "visit_with"]

pytestmark = MARKS

DROP = """(type) => {
  const data = new DataTransfer();
  const content = type === "text/plain" ? "not a picture" : window.picture;
  data.items.add(new File([content], type === "text/plain" ? "notes.txt" : "mine.png", { type }));
  const options = { dataTransfer: data, bubbles: true, cancelable: true };
  document.getElementById("stage").dispatchEvent(new DragEvent("drop", options));
}"""
OWN_PICTURE = """async () => {
  const canvas = new OffscreenCanvas(64, 40);
  const context = canvas.getContext("2d");
  context.fillStyle = "#c03060";
  context.fillRect(0, 0, 64, 40);
  window.picture = await canvas.convertToBlob({ type: "image/png" });
}"""


def drop_own_picture(visit):
    visit.page.evaluate(OWN_PICTURE)
    visit.page.evaluate(DROP, "image/png")


def test_nothing_moves_by_itself(visit):
    visit.page.evaluate(
        """() => {
          window.shift = 0;
          window.shifted = [];
          new PerformanceObserver((list) => {
            for (const entry of list.getEntries()) {
              window.shift += entry.value;
              for (const { node, previousRect: a, currentRect: b } of entry.sources) {
                window.shifted.push(`${node?.id || node?.className} ${a.x},${a.y} ${a.width}x`
                  + `${a.height} to ${b.x},${b.y} ${b.width}x${b.height}`);
              }
            }
          }).observe({ type: "layout-shift", buffered: true });
        }"""
    )
    assert visit.page.inner_text("#status") == "Ready"
    visit.wait_for_text("#model", "Model: tiny-lingbot-world")
    visit.wait("document.getElementById('poster').naturalWidth > 0")
    visit.screenshot("web-idle")
    # The picture takes the shape of the server's worlds, 16 : 9 here, once that is known.
    assert visit.page.evaluate("window.shift") < 0.005, visit.page.evaluate("window.shifted")
    visit.start()
    visit.page.wait_for_timeout(300)
    while_walking = visit.page.evaluate("window.shift")
    visit.page.keyboard.down("KeyW")
    visit.page.wait_for_timeout(1500)
    visit.page.keyboard.up("KeyW")
    assert visit.page.evaluate("window.shift") == while_walking


def test_video_time_advances_over_chunks(visit):
    visit.start()
    # Nine pixel frames, then twelve and twelve: the fourth chunk starts at 33 / 16 s.
    visit.wait("document.getElementById('video').currentTime > 33 / 16")
    assert visit.page.inner_text("#status") == "Running"
    size = visit.page.evaluate("[video.videoWidth, video.videoHeight]")
    assert size == [256, 144]
    visit.page.click("#live-toggle")
    visit.wait_for_text("#rate", "of 16 fps")
    assert re.match(r"\d+\.\d\d s", visit.page.inner_text("#first"))
    start = visit.server.received[0]
    assert isinstance(start, protocol.SessionStart)
    assert (start.unbounded, start.queue, start.fps, start.seed) == (True, True, 16, 42)
    assert (start.width, start.height) == (256, 144)


@pytest.mark.parametrize("scene", ["day", "dusk", "night"])
def test_one_click_on_a_scene_starts_it(visit, scene):
    visit.page.click(f'[data-scene="{scene}"]')
    visit.wait_for_text("#status", "Running")
    (start,) = [m for m in visit.server.received if isinstance(m, protocol.SessionStart)]
    assert start.prompt == SCENES[scene].prompt
    assert start.image_reference.image_url.startswith("data:image/png;base64,")
    assert f"{scene}.png" in visit.page.get_attribute("#poster", "src")


def test_two_quick_clicks_start_one_world(visit):
    visit.page.dblclick('[data-scene="dusk"]')
    visit.wait_for_text("#status", "Running")
    visit.page.wait_for_timeout(300)
    assert len([m for m in visit.server.received if isinstance(m, protocol.SessionStart)]) == 1


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
    visit.stop()
    visit.page.click("#live-toggle")
    visit.wait_for_text("#log", "Stopped after")
    assert not visit.page.is_visible("#stop")
    assert not visit.page.is_visible("#alert")
    visit.start()
    assert visit.page.inner_text("#status") == "Running"


def test_queue_position_is_shown(visit):
    visit.server.script.queue_positions = (2, 1)
    visit.page.click("#live-toggle")
    visit.page.click("#start")
    visit.wait_for_text("#status", "Waiting in line, position 2")
    visit.wait_for_text("#queue", "2 in line")
    visit.wait_for_text("#status", "you are next")
    visit.wait_for_text("#queue", "1 you are next")
    visit.wait_for_text("#status", "Running")
    visit.wait("!/\\d/.test(queue.textContent)")


def test_own_picture_is_shown_and_wants_a_prompt_of_its_own(visit):
    assert visit.page.input_value("#prompt") == "The island at noon."
    drop_own_picture(visit)
    assert visit.page.input_value("#prompt") == ""
    assert visit.page.evaluate("document.activeElement.id") == "prompt"
    assert visit.page.inner_text("#own-name") == "mine.png"
    assert visit.page.is_visible("#own-thumb")
    visit.wait("poster.naturalWidth === 64 && own_thumb.naturalWidth === 64".replace(
        "own_thumb", "document.getElementById('own-thumb')"
    ))  # fmt: skip
    visit.page.click("#start")
    visit.page.wait_for_timeout(200)
    assert visit.server.received == []
    visit.page.fill("#prompt", "A red wall.")
    visit.start()
    (start,) = [m for m in visit.server.received if isinstance(m, protocol.SessionStart)]
    assert start.prompt == "A red wall."
    visit.stop()
    # The scene comes with its own text again, and the picture with its own.
    visit.page.click('[data-scene="dusk"]')
    visit.wait_for_text("#status", "Running")
    assert "dusk" in visit.server.received[-1].prompt


def test_own_picture_is_shown_after_a_walk(visit):
    visit.start()
    visit.stop()
    assert visit.page.is_visible("#video")
    drop_own_picture(visit)
    assert visit.page.is_visible("#poster")
    assert not visit.page.is_visible("#video")
    visit.wait("poster.naturalWidth === 64")


def test_own_picture_during_a_walk_waits_for_start_over(visit):
    visit.start()
    drop_own_picture(visit)
    assert visit.page.is_visible("#setup")
    assert visit.page.is_visible("#video")
    visit.page.click("#reset")
    assert not visit.page.is_visible("#ask")
    visit.page.fill("#prompt", "A red wall.")
    visit.start_over()
    (reset,) = [m for m in visit.server.received if isinstance(m, protocol.SessionReset)]
    assert reset.prompt == "A red wall."
    assert reset.image_reference.image_url.startswith("data:image/png;base64,")


def test_dropped_file_that_is_no_picture_is_refused_in_words(visit):
    visit.page.evaluate(DROP, "text/plain")
    assert visit.page.inner_text("#own-name") == "notes.txt"
    visit.wait_for_text("#notice", "cannot show “notes.txt”")
    visit.page.fill("#prompt", "Notes.")
    visit.page.click("#start")
    visit.wait_for_text("#alert p", "The server cannot use this picture.")
    visit.wait_for_text("#status", "Not running")
    # Its own words are among the events.
    visit.page.click("#live-toggle")
    assert visit.page.inner_text("#log").count("cannot be decoded") == 1
    assert visit.page.inner_text("#again") == "Try again"
    visit.screenshot("web-refused")
    visit.page.click("#setup-toggle")
    visit.page.click('[data-scene="day"]')
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
    visit.page.fill("#prompt", "Confetti.")
    visit.start()
    sent = visit.server.received[0].image_reference.image_url
    assert sent.startswith("data:image/jpeg;base64,")
    assert len(sent) < 4_000_000


def test_invalid_size_is_not_sent_but_shown(visit):
    visit.page.click("summary")
    visit.page.fill("#width", "250")
    visit.page.click("summary")
    visit.page.click("#start")
    visit.page.wait_for_timeout(200)
    assert visit.server.received == []
    assert visit.page.inner_text("#status") == "Ready"
    assert visit.page.is_visible("#width")
