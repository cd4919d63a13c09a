"""Steering in a real browser: keys, pads, drags, a gamepad; a release is never lost."""

import pytest

from tests.web.browser import FORWARD, MARKS, REST, browser, cameras, server, visit, visit_with

__all__ = ["browser", "server", "visit", "visit_with"]

pytestmark = MARKS

# Half of six degrees, the turn of one latent frame.
SIN, COS = 0.052336, 0.99863
TURN_RIGHT = {"translation": [0, 0, 0], "rotation": [0, SIN, 0, COS]}


def middle(visit):
    box = visit.page.locator("#stage").bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_hold_and_release_a_key(visit):
    visit.start()
    visit.page.keyboard.down("KeyW")
    visit.wait_until(lambda: cameras(visit.server) == [FORWARD])
    assert "held" in visit.page.get_attribute('[data-key="KeyW"]', "class")
    visit.page.keyboard.up("KeyW")
    visit.wait_until(lambda: cameras(visit.server) == [FORWARD, REST])
    # Control to pixel was measured for the first event.
    visit.page.click("#live-toggle")
    visit.wait_for_text("#delay", "ms")
    visit.screenshot("web-running")


@pytest.mark.parametrize(
    ("key", "translation", "rotation"),
    [
        ("ArrowUp", [0, 0, 0.05], [0, 0, 0, 1]), ("ArrowDown", [0, 0, -0.05], [0, 0, 0, 1]),
        ("ArrowRight", [0, 0, 0], [0, SIN, 0, COS]), ("ArrowLeft", [0, 0, 0], [0, -SIN, 0, COS]),
    ],
)  # fmt: skip
def test_arrows_walk_and_turn(visit, key, translation, rotation):
    visit.start()
    visit.page.keyboard.down(key)
    visit.wait_until(lambda: len(cameras(visit.server)) == 1)
    assert cameras(visit.server) == [{"translation": translation, "rotation": rotation}]
    visit.page.keyboard.up(key)
    visit.wait_until(lambda: cameras(visit.server)[-1] == REST)


def test_two_keys_of_one_direction_count_once(visit):
    visit.start()
    visit.page.keyboard.down("KeyW")
    visit.wait_until(lambda: cameras(visit.server) == [FORWARD])
    visit.page.keyboard.down("ArrowUp")
    visit.page.keyboard.up("KeyW")
    visit.page.wait_for_timeout(200)
    assert cameras(visit.server) == [FORWARD]
    visit.page.keyboard.up("ArrowUp")
    visit.wait_until(lambda: cameras(visit.server) == [FORWARD, REST])


def test_a_key_is_seen_as_on_its_way_until_its_picture_is_shown(visit):
    visit.start()
    walked = visit.page.evaluate("document.getElementById('path').toDataURL()")
    visit.page.keyboard.down("KeyW")
    # In the same task as the key: nothing has been heard of the server.
    assert visit.page.inner_text("#pose") == "on its way"
    assert "coming" in visit.page.get_attribute('[data-key="KeyW"]', "class")
    assert visit.page.evaluate("document.getElementById('path').toDataURL()") != walked
    visit.wait("document.getElementById('pose').textContent.includes('heading')")
    assert "coming" not in visit.page.get_attribute('[data-key="KeyW"]', "class")
    visit.page.keyboard.up("KeyW")
    assert visit.page.inner_text("#pose") == "on its way"


@pytest.mark.parametrize(
    "leave",
    [
        "window.dispatchEvent(new Event('blur'))",
        "document.dispatchEvent(new Event('visibilitychange'))",
        "document.getElementById('next-prompt').focus()",
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
    # The visitor need not know, the events do.
    assert not visit.page.is_visible("#alert")
    assert visit.page.evaluate("log.textContent").count("the queue is full") == 2


def test_typing_does_not_steer(visit):
    visit.start()
    visit.page.fill("#next-prompt", "")
    visit.page.type("#next-prompt", "wasd ijkl f")
    visit.page.keyboard.press("ArrowLeft")
    visit.page.keyboard.press("Escape")
    visit.page.keyboard.press("KeyS")
    visit.wait_until(lambda: len(cameras(visit.server)) == 2)
    assert [c["translation"] for c in cameras(visit.server)] == [[0, 0, -0.05], [0, 0, 0]]
    assert not visit.page.evaluate("document.fullscreenElement")


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


def test_mouse_drag_looks_around(visit):
    visit.start()
    x, y = middle(visit)
    visit.page.mouse.move(x, y)
    visit.page.mouse.down()
    visit.page.mouse.move(x + 4, y)
    visit.page.wait_for_timeout(150)
    assert cameras(visit.server) == []  # a hand that trembles
    visit.page.mouse.move(x + 200, y)
    visit.wait_until(lambda: cameras(visit.server) == [TURN_RIGHT])
    assert visit.page.locator(".stick:not([hidden])").count() == 1
    visit.page.mouse.move(x + 200, y - 200)
    visit.wait_until(lambda: len(cameras(visit.server)) == 2)
    assert cameras(visit.server)[-1]["rotation"][0] == pytest.approx(0.0349, abs=2e-4)
    visit.page.mouse.up()
    visit.wait_until(lambda: cameras(visit.server)[-1] == REST)
    assert visit.page.locator(".stick").count() == 0


def test_drag_is_gentle_near_its_start(visit):
    visit.start()
    x, y = middle(visit)
    visit.page.mouse.move(x, y)
    visit.page.mouse.down()
    visit.page.mouse.move(x + 14, y)
    visit.wait_until(lambda: len(cameras(visit.server)) == 1)
    assert cameras(visit.server)[0]["rotation"][1] == pytest.approx(SIN / 5, rel=0.01)
    visit.page.evaluate("window.dispatchEvent(new Event('blur'))")
    visit.wait_until(lambda: cameras(visit.server)[-1] == REST)


def test_fingers_walk_on_the_left_and_look_on_the_right(visit_with):
    visit = visit_with(has_touch=True)
    visit.start()
    x, y = middle(visit)
    touch = visit.page.context.new_cdp_session(visit.page)

    def send(kind, *points):
        spots = [{"x": px, "y": py, "id": i} for i, (px, py) in enumerate(points)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": spots})

    send("touchStart", (x - 200, y))
    send("touchMove", (x - 200, y - 150))
    visit.wait_until(lambda: cameras(visit.server) == [FORWARD])
    send("touchStart", (x - 200, y - 150), (x + 200, y))
    send("touchMove", (x - 200, y - 150), (x + 350, y))
    visit.wait_until(lambda: len(cameras(visit.server)) == 2)
    both = cameras(visit.server)[-1]
    assert both["rotation"] == TURN_RIGHT["rotation"]
    assert both["translation"][2] == pytest.approx(0.05, rel=0.01)
    send("touchEnd")
    visit.wait_until(lambda: cameras(visit.server)[-1] == REST)


def test_gamepad_steers(visit):
    visit.start()
    visit.page.evaluate(
        """() => {
          window.pad = { connected: true, axes: [0, -1, 0, 0], buttons: [] };
          navigator.getGamepads = () => [window.pad];
          window.dispatchEvent(new Event("gamepadconnected"));
        }"""
    )
    visit.wait_until(lambda: cameras(visit.server) == [FORWARD])
    visit.page.evaluate("window.pad.axes = [0.1, 0, -0.05, 0]")
    visit.wait_until(lambda: cameras(visit.server) == [FORWARD, REST])
    visit.page.evaluate(
        "window.pad.buttons = Array(16).fill().map((_, i) => ({pressed: i === 12}))"
    )
    visit.wait_until(lambda: cameras(visit.server)[-1] == FORWARD)
    visit.page.evaluate("navigator.getGamepads = () => [null]")
    visit.wait_until(lambda: cameras(visit.server)[-1] == REST)


def test_full_screen_by_key_button_and_double_click(visit):
    visit.start()
    full = "document.fullscreenElement?.id === 'scene'"
    for enter in (
        lambda: visit.page.keyboard.press("KeyF"),
        lambda: visit.page.click("#full"),
        lambda: visit.page.dblclick("#stage", position={"x": 400, "y": 200}),
    ):
        enter()
        visit.wait(full)
        # The pads lie on the picture, and steer.
        assert visit.page.is_visible("#move")
        enter()
        visit.wait("!document.fullscreenElement")
    assert cameras(visit.server) == []
    visit.page.keyboard.press("KeyF")
    visit.wait(full)
    visit.page.keyboard.down("KeyW")
    visit.wait_until(lambda: cameras(visit.server) == [FORWARD])


def test_keyboard_alone_starts_and_stops(visit):
    visit.page.keyboard.press("Tab")
    for _ in range(40):
        if visit.page.evaluate("document.activeElement.id") == "start":
            break
        visit.page.keyboard.press("Tab")
    visit.page.keyboard.press("Enter")
    visit.wait_for_text("#status", "Running")
    # The picture has the focus now, so that keys steer; what stands before it is reached backwards.
    assert visit.page.evaluate("document.activeElement.id") == "stage"
    for _ in range(5):
        visit.page.keyboard.press("Shift+Tab")
    assert visit.page.evaluate("document.activeElement.id") == "stop"
    visit.page.keyboard.press("Enter")
    visit.wait_for_text("#status", "Ready")
