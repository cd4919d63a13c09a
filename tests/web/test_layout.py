"""Where things stand on the page: nothing overlaps, the picture gets the room, a phone can walk."""

import itertools

import pytest

from tests.web.browser import (
    DESKTOP,
    FORWARD,
    MARKS,
    PHONE,
    browser,
    cameras,
    server,
    visit,
    visit_with,
)

__all__ = ["browser", "server", "visit", "visit_with"]

pytestmark = MARKS

WIDTHS = [320, 360, 480, 600, 699, 760, 900, 1024, 1140, 1280, 1920, 2560]
LOW = [(568, 320), (844, 390), (932, 430)]
# What is seen of every control and text, as far as its panel and the window show it.
BOXES = """() => {
  const wanted = "h1, .status, .model, .clock, button, input, select, textarea, summary, kbd, "
    + ".tile, .map, .notice, .alert, .pad span, .steps, .field > span, .figures dd, .figures dt, "
    + "#intervals, .log, legend";
  const clip = (box, edge) => ({
    left: Math.max(box.left, edge.left), top: Math.max(box.top, edge.top),
    right: Math.min(box.right, edge.right), bottom: Math.min(box.bottom, edge.bottom),
  });
  const found = [];
  for (const element of document.querySelectorAll(wanted)) {
    if (!element.checkVisibility({ visibilityProperty: true })) continue;
    let box = element.getBoundingClientRect();
    const panel = element.closest(".panel");
    if (panel) box = clip(box, panel.getBoundingClientRect());
    if (box.right - box.left < 1 || box.bottom - box.top < 1) continue;
    const inside = [...document.querySelectorAll(wanted)].map((other) => other.contains(element));
    found.push({
      name: element.id || element.className || element.textContent.trim(),
      box: [box.left, box.top, box.right, box.bottom],
      index: [...document.querySelectorAll(wanted)].indexOf(element), inside,
      cut: element.matches("button, .status, .clock, summary")
        && Math.max(element.scrollWidth - element.clientWidth,
                    ...[...element.children].map((c) => c.scrollWidth - c.clientWidth), 0),
    });
  }
  return found;
}"""


def overlaps(page):
    """Pairs of things that lie on each other, and what is cut or outside of the window."""
    found = page.evaluate(BOXES)
    width = page.viewport_size["width"]
    wrong = [f"{one['name']} is cut" for one in found if one["cut"] > 1]
    wrong += [
        f"{one['name']} is outside" for one in found if one["box"][0] < 0 or one["box"][2] > width
    ]
    for one, other in itertools.combinations(found, 2):
        if one["inside"][other["index"]] or other["inside"][one["index"]]:
            continue
        (l1, t1, r1, b1), (l2, t2, r2, b2) = one["box"], other["box"]
        if min(r1, r2) - max(l1, l2) > 1 and min(b1, b2) - max(t1, t2) > 1:
            wrong.append(f"{one['name']} and {other['name']} overlap")
    return wrong


def test_the_check_sees_an_overlap(visit):
    assert overlaps(visit.page) == []
    visit.page.evaluate("document.getElementById('live-toggle').style.marginLeft = '-40px'")
    assert "setup-toggle and live-toggle overlap" in overlaps(visit.page)
    move = "document.getElementById('live-toggle').style.translate = '60px'"
    visit.page.evaluate(move)
    assert "live-toggle is outside" in overlaps(visit.page)


SIZES = [*((width, 720) for width in WIDTHS), *LOW]


def test_nothing_overlaps_at_any_width(visit_with):
    """Before, during and after a walk, with each panel open, and while something is said."""
    visit = visit_with(script="window.WEB_TEST = true")
    wrong = []

    def look(what):
        for width, height in SIZES:
            visit.page.set_viewport_size({"width": width, "height": height})
            wrong.extend(f"{what} at {width}x{height}: {text}" for text in overlaps(visit.page))

    say = """(text) => {
      for (const id of ["alert", "notice"]) document.getElementById(id).hidden = !text;
      document.getElementById("notice").textContent = text;
      document.querySelector("#alert p").textContent = text;
      document.getElementById("again").textContent = "Start at 832 x 480";
      document.getElementById("again").hidden = false;
    }"""
    look("idle")
    visit.page.evaluate(say, "The server had to start its model anew, so this world is gone.")
    look("idle, with an alert")
    visit.page.evaluate(say, "")
    visit.start()
    visit.page.evaluate("document.getElementById('steps').hidden = false")
    look("walking")
    visit.page.evaluate(say, "The server did not take the last change. Please try again.")
    look("walking, with an alert")
    visit.page.evaluate(say, "")
    for panel in ("setup", "live"):
        visit.page.set_viewport_size(DESKTOP)
        visit.page.click(f"#{panel}-toggle")
        look(f"walking, {panel} open")
    visit.page.set_viewport_size(DESKTOP)
    visit.page.click("#setup-toggle")
    visit.page.click("summary")
    look("all settings")
    assert not wrong, "\n".join(wrong)


# Of the picture itself, without the bars beside or above it.
SHARE = """() => {
  const box = document.getElementById("video").getBoundingClientRect();
  const scale = Math.min(box.width / video.videoWidth, box.height / video.videoHeight);
  const panels = [...document.querySelectorAll(".panel")].filter((panel) => !panel.hidden);
  const area = scale * video.videoWidth * scale * video.videoHeight;
  return { panels: panels.length, share: area / innerWidth / innerHeight };
}"""


@pytest.mark.parametrize("size", [(416, 240), (96, 64), (256, 144)])
def test_the_picture_takes_most_of_the_window_while_one_walks(visit, size):
    visit.page.click("summary")
    visit.page.fill("#width", str(size[0]))
    visit.page.fill("#height", str(size[1]))
    visit.start()
    found = visit.page.evaluate(SHARE)
    assert found["panels"] == 0
    assert found["share"] >= 0.6
    # What was folded away comes back.
    visit.stop()
    assert visit.page.is_visible("#setup")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_fits_a_small_laptop(visit_with, scheme):
    visit = visit_with(color_scheme=scheme)
    visit.start()
    visit.page.keyboard.down("KeyW")
    visit.page.wait_for_timeout(1500)
    visit.screenshot(f"web-{scheme}")
    for panel in ("live", "setup"):
        visit.page.click(f"#{panel}-toggle")
        overflow = visit.page.evaluate(
            """() => [document.documentElement.scrollHeight - innerHeight,
                      document.documentElement.scrollWidth - innerWidth,
                      ...[...document.querySelectorAll(".panel, .scene")]
                        .map((box) => box.scrollHeight - box.clientHeight)]"""
        )
        assert max(overflow) <= 0, panel


def test_phone_needs_no_sideways_scrolling(visit_with):
    visit = visit_with(viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=2)
    visit.page.tap("#start")
    visit.wait("video.currentTime > 0.2")
    visit.screenshot("web-phone")
    assert visit.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    pads = visit.page.locator(".pad").all()
    assert all(pad.bounding_box()["y"] < PHONE["height"] - 150 for pad in pads)
    # Arrows, not letters of a keyboard that a phone has not got.
    assert visit.page.inner_text('[data-key="KeyW"]') == "↑"


@pytest.mark.parametrize("size", LOW)
def test_phone_on_its_side_can_be_walked_without_scrolling(visit_with, size):
    viewport = {"width": size[0], "height": size[1]}
    visit = visit_with(viewport=viewport, has_touch=True, is_mobile=True)
    visit.page.tap("#start")
    visit.wait("video.currentTime > 0.2")
    visit.screenshot(f"web-phone-{size[0]}")
    assert visit.page.evaluate("document.documentElement.scrollHeight") <= size[1]
    for name in ("#move", "#look", "#video"):
        box = visit.page.locator(name).bounding_box()
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= size[1]
    box = visit.page.locator('[data-key="KeyW"]').bounding_box()
    visit.page.mouse.move(box["x"] + 9, box["y"] + 9)
    visit.page.mouse.down()
    visit.wait_until(lambda: cameras(visit.server) == [FORWARD])
    visit.page.mouse.up()


def test_controls_fade_while_nobody_moves_and_come_back(visit):
    visit.start()
    visit.page.mouse.move(640, 300)
    visit.page.wait_for_selector(".scene.calm", timeout=8000)
    visit.page.mouse.move(660, 300)
    visit.wait("!document.querySelector('.scene.calm')")


def test_motion_is_reduced_where_it_is_asked_for(visit_with):
    visit = visit_with(reduced_motion="reduce")
    duration = "getComputedStyle(document.querySelector('.steer')).transitionDuration"
    assert visit.page.evaluate(duration) == "0s"
    assert visit_with().page.evaluate(duration) == "0.4s"


def test_everything_that_can_be_used_has_a_name(visit):
    nameless = visit.page.evaluate(
        """() => [...document.querySelectorAll(
            "button, input, select, textarea, canvas, [tabindex]")]
          .filter((element) => !(element.ariaLabel || element.labels?.length
            || element.getAttribute("aria-labelledby") || element.textContent.trim()
            || ["still", "again", "ask-no", "ask-yes"].includes(element.id)))
          .map((element) => element.outerHTML)"""
    )
    assert nameless == []
