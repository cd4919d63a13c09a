"""The toy world on the real server, judged by the pixels of the page: keys, prompt and reset act.

The page's own events say when a key is in the video; the pictures around that moment are compared.
"""

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.helpers.server import RealServer, real_server
from tests.web.browser import DESKTOP, MARKS, browser
from vllm_omni.diffusion.utils.island import View, render
from vllm_omni.diffusion.utils.scenes import MODEL, SCENES

if TYPE_CHECKING:
    from playwright.sync_api import Page

__all__ = ["browser"]

pytestmark = MARKS

FPS = 16
CHUNK_S = 12 / FPS
PATIENCE_MS = 60_000
# Every picture that the video shows, small, and the media time at which each event takes effect.
SPY = """
window.seen = { pictures: [], starts: [], before: 0 };
const hear = (data) => {
  if (typeof data !== "string") return;
  const message = JSON.parse(data);
  if (message.type !== "video.chunk_metadata") return;
  if (message.generation_chunk_index === 0) seen.before = 0;
  for (const _ of message.started_event_ids ?? []) seen.starts.push(seen.before / 16);
  seen.before += message.num_frames;
};
window.WebSocket = class extends WebSocket {
  constructor(...given) {
    super(...given);
    this.addEventListener("message", ({ data }) => hear(data));
  }
};
addEventListener("DOMContentLoaded", () => {
  const video = document.getElementById("video");
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [96, 64];
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const look = (_, { mediaTime }) => {
    const last = seen.pictures.at(-1);
    if (last && mediaTime < last.media) seen.pictures = [];
    pen.drawImage(video, 0, 0, 96, 64);
    seen.pictures.push({ media: mediaTime, rgba: pen.getImageData(0, 0, 96, 64).data });
    video.requestVideoFrameCallback(look);
  };
  video.requestVideoFrameCallback(look);
});
window.pictureAt = (media) => {
  const gap = (picture) => Math.abs(picture.media - media);
  const best = seen.pictures.reduce((a, b) => (gap(b) < gap(a) ? b : a));
  let text = "";
  for (const byte of best.rgba) text += String.fromCharCode(byte);
  return [best.media, btoa(text)];
};
"""


@dataclass
class Walk:
    """A page on which a world runs."""

    page: "Page"

    def wait(self, expression: str) -> None:
        """Wait until an expression is true on the page."""
        self.page.wait_for_function(f"() => {expression}", timeout=PATIENCE_MS)

    def picture(self, media: float) -> np.ndarray:
        """The picture shown nearest to a media time that has passed, [64, 96, 3], float."""
        _, text = self.page.evaluate(f"pictureAt({media})")
        rgba = np.frombuffer(base64.b64decode(text), np.uint8)
        return rgba.reshape(64, 96, 4)[..., :3].astype(float)

    def next_start(self, act: Callable[[], None]) -> float:
        """Do something that sends one event; returns the media time from which it acts."""
        known = self.page.evaluate("seen.starts.length")
        act()
        self.wait(f"seen.starts.length > {known}")
        return self.page.evaluate("seen.starts.at(-1)")

    def hold(self, key: str, seconds: float) -> float:
        """Hold a key for a media time, until its end acts too; returns when it begins to act."""
        began = self.next_start(lambda: self.page.keyboard.down(key))
        self.wait(f"seen.pictures.at(-1).media > {began + seconds}")
        self.next_start(lambda: self.page.keyboard.up(key))
        return began

    def start_over(self) -> None:
        """Press Start over and wait for the new video."""
        self.page.click("#reset")
        self.page.click("#ask-yes")
        self.wait("seen.pictures.length && seen.pictures.at(-1).media < 1")
        self.wait("seen.pictures.at(-1).media > 1.2")


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server(model=MODEL) as running:
        yield running


@pytest.fixture
def walk(browser, server) -> Iterator[Walk]:
    """The scene of the day, a second and a half after its start; the quickest reaction."""
    context = browser.new_context(viewport=DESKTOP)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.add_init_script(SPY)
    page.goto(server.address)
    page.wait_for_function("() => document.getElementById('width').value === '96'")
    page.evaluate("() => { document.getElementById('lead').value = '250'; }")
    page.click('[data-scene="day"]')
    walk = Walk(page)
    walk.wait("seen.pictures.length && seen.pictures.at(-1).media > 1.5")
    yield walk
    context.close()


def sky(picture: np.ndarray) -> float:
    """Mean of all colours of the uppermost rows."""
    return float(picture[:12].mean())


def shift(before: np.ndarray, after: np.ndarray) -> int:
    """By how many columns the picture below the sky has moved to the right, -24 to 24."""
    a, b = before[20:], after[20:]

    def error(columns: int) -> float:
        end = 96 - abs(columns)
        left, right = (
            (a[:, :end], b[:, 96 - end :]) if columns > 0 else (a[:, 96 - end :], b[:, :end])
        )
        return float(np.abs(left - right).mean())

    return min(range(-24, 25), key=error)


def growth(before: np.ndarray, after: np.ndarray) -> float:
    """Factor by which what is below the horizon has grown about the middle, 0.7 to 1.43."""
    rows, columns = np.mgrid[32:64, 8:88].astype(float)

    def error(factor: float) -> float:
        y = np.rint(32 + (rows - 32) / factor).astype(int)
        x = np.rint(47.5 + (columns - 47.5) / factor).astype(int)
        inside = (y < 64) & (x >= 0) & (x < 96)
        wanted = before[np.where(inside, y, 0), np.where(inside, x, 0)]
        return float(np.abs(after[32:64, 8:88] - wanted)[inside].mean())

    return min(np.geomspace(0.7, 1 / 0.7, 41), key=error)


def test_moving_pictures_are_measured_rightly() -> None:
    """The two measures of motion, on the renderer's own pictures of the same scene."""
    view, day = SCENES["day"].view, np.array([1.0, 0, 0])

    def seen(ahead: float, turn: float) -> np.ndarray:
        x, z = view.x + ahead * np.sin(view.heading), view.z + ahead * np.cos(view.heading)
        return render(View(x, z, view.heading + turn), day).astype(float)

    assert growth(seen(0, 0), seen(0.6, 0)) > 1.05
    assert growth(seen(0.6, 0), seen(0, 0)) < 0.95
    assert shift(seen(0, 0), seen(0, 0)) == 0
    assert 5 <= shift(seen(0, 0), seen(0, -0.1)) <= 9
    assert -9 <= shift(seen(0, 0), seen(0, 0.1)) <= -5


def test_keys_walk_and_turn_and_a_reset_returns(walk: Walk) -> None:
    first = walk.picture(0.0)
    still = walk.picture(1.5)
    assert shift(walk.picture(0.75), still) == 0
    began = walk.hold("KeyW", 1.5)
    ahead = walk.picture(began + 1.4)
    assert growth(walk.picture(began), ahead) > 1.08
    walk.start_over()
    back = walk.picture(0.0)
    assert np.abs(back - first).mean() < 2  # the same picture through the same encoder
    assert np.abs(ahead - first).mean() > 10
    assert np.abs(walk.picture(1.2) - still).mean() < 10
    for key, sign in (("KeyJ", 1), ("KeyL", -1)):
        began = walk.hold(key, 0.9)
        turned = [
            shift(walk.picture(began + t), walk.picture(began + t + 0.25)) for t in (0.1, 0.35, 0.6)
        ]
        # A slow machine shows the key later; it never turns the other way.
        assert 3 <= max(sign * columns for columns in turned) <= 12, (key, turned)
        assert min(sign * columns for columns in turned) >= -1, (key, turned)


def test_the_prompt_night_makes_the_sky_dark_within_three_chunks(walk: Walk) -> None:
    assert sky(walk.picture(1.5)) > 150
    walk.page.fill("#next-prompt", "night")
    started = walk.next_start(lambda: walk.page.keyboard.press("Enter"))
    dark_by = started + 3 * CHUNK_S
    walk.wait(f"seen.pictures.at(-1).media > {dark_by}")
    assert sky(walk.picture(dark_by)) < 80
