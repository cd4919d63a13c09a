"""Interactions that come while the session's picture is still on its way."""

import asyncio

import pytest

from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.local_server import LateImages, local_server
from tests.helpers.socket_client import SocketClient, camera_event, socket_client, start_message

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

ENDLESS = start_message(num_frames=None, unbounded=True)
MOST = 64


@pytest.fixture
def images():
    return LateImages()


@pytest.fixture
def server(images):
    with local_server(FakeExecutor(sessions=2), images=images) as running:
        yield running
        images.come.set()


async def began(client: SocketClient) -> None:
    await client.say(ENDLESS)
    await client.expect("video.start")


async def silent(client: SocketClient) -> None:
    """Everything said so far was read, and nothing was answered."""
    await client.say({"type": "session.ping"})
    await client.expect("session.pong")


async def test_they_are_answered_once_the_session_is_open_in_order_and_applied(server, images):
    names = [f"early-{number}" for number in range(MOST - 1)]
    async with socket_client(server.url) as client:
        await began(client)
        for name in names:
            await client.say(camera_event(name))
        await silent(client)
        assert server.executor.opened_total == 0
        images.come.set()
        await client.say(camera_event("late"))
        queued, started = [], []
        while "late" not in started:
            message = await client.hear()
            if isinstance(message, dict) and message["type"] == "session.interaction.queued":
                queued.append(message["event_id"])
            elif isinstance(message, dict):
                started += message["started_event_ids"]
    assert queued == started == [*names, "late"]


async def test_a_bad_one_is_refused_at_once_and_the_rest_is_kept(server, images):
    async with socket_client(server.url) as client:
        await began(client)
        event = {"multi_modal_data": {"camera": {"mode": "absolute"}}}
        await client.say(camera_event("wrong", event=event))
        await client.say(camera_event("good"))
        assert (await client.expect("error"))["event_id"] == "wrong"
        images.come.set()
        assert (await client.until("session.interaction.queued"))["event_id"] == "good"


async def test_what_the_engine_refuses_is_told_after_the_open(server, images):
    async with socket_client(server.url) as client:
        await began(client)
        for _ in range(2):
            await client.say(camera_event("twice"))
        await silent(client)
        images.come.set()
        assert (await client.until("session.interaction.queued"))["event_id"] == "twice"
        answer = await client.error()
        assert (answer["code"], answer["event_id"]) == ("event_id_conflict", "twice")
        await client.chunk()


async def test_their_number_is_bounded(server, images):
    async with socket_client(server.url) as client:
        await began(client)
        for number in range(MOST + 1):
            await client.say(camera_event(str(number)))
        answer = await client.expect("error")
        assert answer["event_id"] == str(MOST)
        assert "64 events wait for it" in answer["message"]
        images.come.set()
        await client.chunk()


async def test_a_client_that_leaves_before_the_open_leaves_nothing(server, images):
    async with socket_client(server.url) as client:
        await began(client)
        await client.say(camera_event("early"))
        await silent(client)
    await asyncio.to_thread(images.come.set)
    async with socket_client(server.url) as client:
        await client.say(start_message())
        done = await client.rest()
        assert not done["stopped"]
    assert server.executor.opened_total == 1
