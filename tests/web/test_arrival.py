"""Coming to a server that wants a key, loads its model, refuses or goes away, in plain words."""

import re

import pytest

from tests.web.browser import MARKS, browser, open_visit, server, visit, visit_with
from tests.web.fake_server import FakeServer, Script
from vllm_omni.entrypoints.server import protocol

__all__ = ["browser", "server", "visit", "visit_with"]

pytestmark = MARKS

KEY = "sesame / öffne dich+"


@pytest.fixture(scope="module")
def running_keyed_server():
    server = FakeServer(api_keys=(KEY,))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def keyed_server(running_keyed_server):
    running_keyed_server.script = Script()
    running_keyed_server.received.clear()
    running_keyed_server.requests.clear()
    return running_keyed_server


@pytest.fixture
def keyed_visit(browser, keyed_server):
    visit = open_visit(browser, keyed_server)
    yield visit
    visit.page.context.close()


def starts(server):
    return [m for m in server.received if isinstance(m, protocol.SessionStart)]


def sockets(server):
    return [address for address in server.requests if "realtime/video" in address]


def give_key(visit, key):
    visit.page.fill("#key", key)
    visit.page.keyboard.press("Enter")


class TestKey:
    def test_it_is_asked_for_and_sent_and_never_in_an_address(self, keyed_visit):
        keyed_visit.wait_for_text("#key-text", "This server wants a key.")
        keyed_visit.screenshot("web-key")
        give_key(keyed_visit, "wrong")
        keyed_visit.wait_for_text("#key-text", "does not know this key")
        give_key(keyed_visit, KEY)
        # The server's own size is known now.
        keyed_visit.wait("document.getElementById('width').value === '256'")
        keyed_visit.start()
        assert len(starts(keyed_visit.server)) == 1
        for word in ("sesame", "wrong", "bearer"):
            assert not any(word in address for address in keyed_visit.server.requests)
            assert word not in keyed_visit.page.url

    def test_it_is_kept_for_the_tab_only(self, keyed_visit):
        give_key(keyed_visit, KEY)
        keyed_visit.wait("document.getElementById('width').value === '256'")
        keyed_visit.page.reload()
        keyed_visit.wait("document.getElementById('width').value === '256'")
        assert not keyed_visit.page.is_visible("#key-dialog")
        assert keyed_visit.page.evaluate("localStorage.length + document.cookie.length") == 0

    def test_start_without_it_asks_again_and_opens_no_socket(self, keyed_visit):
        keyed_visit.page.click("#key-no")
        keyed_visit.wait_for_text("#status", "A key is needed")
        keyed_visit.page.click("#start")
        keyed_visit.wait_for_text("#key-text", "This server wants a key.")
        assert sockets(keyed_visit.server) == []
        give_key(keyed_visit, KEY)
        keyed_visit.wait_for_text("#status", "Running")

    def test_a_key_that_is_changed_meanwhile_is_asked_for_once(self, keyed_visit):
        """No reconnect loop: the socket is refused once, and the page asks."""
        give_key(keyed_visit, KEY)
        keyed_visit.wait("document.getElementById('width').value === '256'")
        keyed_visit.page.evaluate("sessionStorage.clear()")
        access = keyed_visit.server
        access.change_keys(("another",))
        try:
            keyed_visit.page.click("#start")
            keyed_visit.wait("document.getElementById('key-dialog').open")
            keyed_visit.page.wait_for_timeout(2500)
            assert len(sockets(access)) == 1
            give_key(keyed_visit, "another")
            keyed_visit.wait_for_text("#status", "Running")
            assert len(sockets(access)) == 2
        finally:
            access.change_keys((KEY,))


def test_a_refused_socket_is_no_lost_one(visit_with, server):
    server.script.lets_in = False
    visit = visit_with()
    visit.page.click("#start")
    visit.wait_for_text("#alert p", "The server does not let this page in.")
    visit.wait_for_text("#alert p", "--allowed-origins")
    visit.page.wait_for_timeout(2500)
    assert len(sockets(server)) == 1
    server.script.lets_in = True
    visit.page.click("#again")
    visit.wait_for_text("#status", "Running")


class TestLoading:
    def test_progress_is_shown_before_the_start(self, visit_with, server):
        server.script.unready = {"status": "unhealthy", "reason": "loading", "progress": 0.25}
        visit = visit_with()
        visit.wait_for_text("#status", "The model is loading, 25 %")
        visit.wait_for_text("#notice", "The model is loading, 25 %")
        server.script.unready = {"status": "unhealthy", "reason": "loading", "progress": 0.5}
        visit.wait_for_text("#status", "The model is loading, 50 %")
        server.script.unready = None
        visit.wait_for_text("#status", "Ready")
        assert not visit.page.is_visible("#notice")

    def test_a_start_meanwhile_waits_for_the_model_not_for_people(self, visit_with, server):
        server.script.unready = {"status": "unhealthy", "reason": "loading", "progress": 0.5}
        visit = visit_with()
        visit.page.click('[data-scene="day"]')
        visit.wait_for_text("#veil", "The model is loading, 50 %")
        assert visit.page.evaluate("document.getElementById('progress').value") == 0.5
        visit.screenshot("web-loading")
        server.script.unready = None
        visit.wait_for_text("#status", "Running")
        assert not visit.page.is_visible("#veil")

    def test_a_server_that_tells_no_progress(self, visit_with, server):
        server.script.unready = {"status": "unhealthy", "reason": "loading"}
        visit = visit_with()
        visit.wait_for_text("#status", "The model is loading, 0 s so far")
        visit.wait_for_text("#status", "The model is loading, 2 s so far")

    @pytest.mark.parametrize(
        ("reason", "words"),
        [("restarting", "starts its model anew"), ("draining", "about to shut down"),
         ("KV pool of rank 3 is lost", "The server is not ready")],
    )  # fmt: skip
    def test_other_reasons(self, visit_with, server, reason, words):
        server.script.unready = {"status": "unhealthy", "reason": reason}
        visit_with().wait_for_text("#status", words)


NEEDS = "832x480 needs 21626880 bytes of KV window, the pool has 393216; ask for less, or raise"


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        ("3 of 3 sessions run and 8 of 8 wait (max_num_seqs, max_queued)", "server_full",
         "Every place on this server is taken"),
        ("the workers were restarted: rank 0 ended", "worker_restarted", "this world is gone"),
        ("prompt: must not be blank", "invalid_request", "cannot use this prompt"),
        ("image_reference: the picture cannot be fetched", "invalid_request",
         "cannot use this picture"),
        ("multi_modal_data.image: is damaged or of an unknown format", "invalid_request",
         "cannot use this picture"),
        ("fps: must be at most 60", "invalid_request", "did not accept this: fps: must be"),
        ("size: 256x144 has 36864 pixels, at most 100 are served", "invalid_request",
         "This server has room for 256 x 144."),
        ("the server is shutting down", None, "The server is shutting down."),
        ("Stall timeout: no progress for 60 s", None, "made no picture for a minute"),
        ("step 2 failed inside the model (RuntimeError)", None, "Something went wrong"),
        ("step 2 ran out of device memory", "out_of_memory", "out of memory"),
    ],
)  # fmt: skip
def test_refusals_are_told_in_a_visitors_words(visit, message, code, words):
    visit.server.script.refusal = protocol.ErrorMessage(message=message, code=code)
    visit.page.click("#start")
    visit.wait_for_text("#alert p", words)
    for jargon in ("max_num_seqs", "KV", "device", "rank", "RuntimeError"):
        assert jargon not in visit.page.inner_text("#alert")
    # Whoever runs the server can read its own words.
    assert message in visit.page.evaluate("log.textContent")
    assert visit.page.is_visible("#setup")


def test_a_size_that_does_not_fit_is_answered_by_one_that_does(visit):
    visit.server.script.refusal = protocol.ErrorMessage(message=NEEDS, code="out_of_memory")
    visit.page.click("summary")
    visit.page.fill("#width", "832")
    visit.page.fill("#height", "480")
    visit.page.click("#start")
    visit.wait_for_text("#alert p", "This server has room for 256 x 144.")
    assert "KV" not in visit.page.inner_text("#alert")
    visit.screenshot("web-size")
    visit.server.script.refusal = None
    visit.page.click("#again")
    visit.wait_for_text("#status", "Running")
    assert (starts(visit.server)[-1].width, starts(visit.server)[-1].height) == (256, 144)


def test_server_is_killed_and_comes_back(visit_with, server):
    visit = visit_with()
    visit.start()
    server.stop()
    try:
        visit.wait_for_text("#alert p", "The connection to the server was lost.")
        visit.wait_for_text("#status", "No connection")
        assert visit.page.is_visible("#again")
        visit.screenshot("web-error")
        server.script.unready = {"status": "unhealthy", "reason": "loading", "progress": 0.5}
    finally:
        server.start()
    # It is back, and a world that is lost has to wait for the model.
    visit.wait_for_text("#alert p", "The model is loading, 50 %")
    server.script.unready = None
    visit.wait_for_text("#log", "The server is back")
    visit.wait_for_text("#status", "Running")
    assert not visit.page.is_visible("#alert")
    assert len(starts(server)) == 2
    # The walk that was lost with the server is still on offer.
    visit.page.click("#save")
    assert visit.page.locator("#walks li").count() == 2
    # The browser itself reports the requests that found nobody; the page has no errors of its own.
    assert all(re.search("ERR_CONNECTION_REFUSED|503", text) for text in visit.console_errors)


def test_reconnect_button_starts_at_once(visit_with, server):
    visit = visit_with()
    server.stop()
    try:
        visit.page.click("#start")
        visit.wait_for_text("#alert p", "Looking for it again")
    finally:
        server.start()
    visit.page.click("#again")
    visit.wait_for_text("#status", "Running")
