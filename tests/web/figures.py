"""Measures the page in a browser: key to picture, stalls, frame gaps; a program, not a test.

    nice -n -5 python -m tests.web.figures --lead 250 --lead 1000

It drives the page against the scripted server with real video. What it reports is seen from
outside the page: the time of the key, the messages of the socket, and the browser's own report of
every video frame that it has put on the screen.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.web.browser import CHROMIUM, FLAGS, sync_playwright
from tests.web.fake_server import FakeServer, Script

if TYPE_CHECKING:  # A test imports this file where there is no playwright, too.
    from playwright.sync_api import Page

FPS = 16
CHUNK_S = 12 / FPS
STALL_MS = 150
KEYS = 12
KEY_EVERY_MS = 1830
"""Not a multiple of a chunk, so that keys fall on all parts of one."""
SETTLE_MS = 8000
SPY = """
window.seen = { keys: [], chunks: [], frames: [], clicked: null, slip: 0 };
let due = Infinity;
setInterval(() => {
  seen.slip = Math.max(seen.slip, performance.now() - due);
  due = performance.now() + 50;
}, 50);
addEventListener("keydown", (event) => {
  if (!event.repeat) seen.keys.push(performance.now());
}, true);
addEventListener("click", () => { seen.clicked ??= performance.now(); }, true);
const hear = (data) => {
  if (typeof data !== "string") return;
  const message = JSON.parse(data);
  if (message.type !== "video.chunk_metadata") return;
  seen.chunks.push({ at: performance.now(), frames: message.num_frames,
                     started: message.started_event_ids ?? [] });
};
window.WebSocket = class extends WebSocket {
  constructor(...given) {
    super(...given);
    this.addEventListener("message", ({ data }) => hear(data));
  }
};
addEventListener("DOMContentLoaded", () => {
  const video = document.getElementById("video");
  const look = (now, { mediaTime }) => {
    seen.frames.push({ at: now, media: mediaTime });
    video.requestVideoFrameCallback(look);
  };
  video.requestVideoFrameCallback(look);
});
"""
SCRIPTS = {
    "steady": Script(chunk_s=0.2),
    "slow": Script(chunk_s=0.7),
    "uneven": Script(chunk_s=0.1, uneven_s=(0.0, 0.3, 0.1, 0.5, 0.0, 0.2, 0.6)),
}


@dataclass(frozen=True)
class Figures:
    """What one walk showed; times in milliseconds.

    Attributes:
        slip_ms: most that a timer of the page came too late, as on a busy machine.
    """

    moving_ms: float
    key_to_picture_ms: list[float]
    gaps_ms: list[float]
    left_ms: list[float]
    slip_ms: float

    def line(self) -> str:
        """The figures in one line."""
        keys, gaps = sorted(self.key_to_picture_ms), sorted(self.gaps_ms)
        stalls = [gap for gap in gaps if gap > STALL_MS]
        p99 = gaps[int(0.99 * len(gaps))]
        return "; ".join([
            f"moving after {self.moving_ms:.0f}",
            f"key to picture {statistics.median(keys):.0f} ({keys[0]:.0f} to {keys[-1]:.0f})",
            f"stalls {len(stalls)}, {sum(stalls):.0f} ms",
            f"gaps P50 {statistics.median(gaps):.0f} P99 {p99:.0f} max {gaps[-1]:.0f}",
            f"left before a chunk {statistics.median(self.left_ms):.0f}",
            f"slip {self.slip_ms:.0f}",
        ])  # fmt: skip


def measure(page: Page, *, lead_ms: int, keys: int = KEYS, settle_ms: int = SETTLE_MS) -> Figures:
    """Walk on an open page that runs SPY and report what was seen."""
    page.evaluate("lead => { document.getElementById('lead').value = lead; }", str(lead_ms))
    page.click("#start")
    page.wait_for_function("() => document.getElementById('video').currentTime > 1")
    page.wait_for_timeout(settle_ms)
    page.evaluate("() => { seen.slip = 0; }")
    for _ in range(keys):
        page.keyboard.down("KeyW")
        page.wait_for_timeout(KEY_EVERY_MS / 2)
        page.keyboard.up("KeyW")
        page.wait_for_timeout(KEY_EVERY_MS / 2)
    page.wait_for_timeout(lead_ms + 2000)
    return _figures(page.evaluate("seen"))


def _figures(seen: dict) -> Figures:
    frames = seen["frames"]
    moving = next(i for i, frame in enumerate(frames) if frame["media"] > 0)
    shown = [frame["at"] for frame in frames[moving:]]
    delays, left, before = [], [], 0
    pressed = {f"camera-{2 * i + 1}": at for i, at in enumerate(seen["keys"])}
    for chunk in seen["chunks"]:
        media = before / FPS
        shown_at = next((f["at"] for f in frames if f["media"] >= media - 0.001), None)
        presses = [pressed[event] for event in chunk["started"] if event in pressed]
        delays += [shown_at - press for press in presses if shown_at is not None]
        playing = [f for f in frames if f["at"] <= chunk["at"]]
        if playing and before > 21:
            left.append(1000 * (media - playing[-1]["media"]))
        before += chunk["frames"]
    gaps = [after - at for at, after in itertools.pairwise(shown)]
    return Figures(shown[0] - seen["clicked"], delays, gaps, left[-KEYS:], seen["slip"])


def main() -> None:
    """Print a line for every script and lead."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--lead", type=int, action="append", help="milliseconds")
    parser.add_argument("--script", choices=SCRIPTS, action="append")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--window", default="1280x720", help="without a GPU, large ones cost time")
    options = parser.parse_args()
    width, height = map(int, options.window.split("x"))
    server = FakeServer()
    server.start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        cases = itertools.product(
            options.script or SCRIPTS, options.lead or (250, 1000, 4000), range(options.repeat)
        )
        for name, lead_ms, _ in cases:
            server.script = SCRIPTS[name]
            page = browser.new_page(viewport={"width": width, "height": height})
            page.add_init_script(SPY)
            page.goto(server.url)
            page.wait_for_timeout(500)
            print(name, lead_ms, measure(page, lead_ms=lead_ms).line(), flush=True)
            page.close()
    server.stop()


if __name__ == "__main__":
    main()
