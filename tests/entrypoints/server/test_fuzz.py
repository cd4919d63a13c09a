"""Thousands of wrong messages and requests beside one honest session, which notices nothing.

The same seed gives the same input. ``make soak`` runs the long version.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import httpx
import psutil
import pytest
from websockets.exceptions import ConnectionClosed

from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.fuzz import Spoiler
from tests.helpers.local_server import LocalServer, local_server, wait_until
from tests.helpers.socket_client import socket_client, start_message

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]

SOCKET_MESSAGES = 20_000
REQUESTS = 5_000
PER_SOCKET = 20
HONEST = start_message(num_frames=9 + 12 * 20, fps=1000, max_lead_ms=0)
LONG = pytest.mark.soak


async def honest_video(server: LocalServer) -> bytes | None:
    """The bytes of the honest session; nothing where the server was full of others."""
    async with socket_client(server.url) as client:
        await client.say(HONEST)
        while True:
            message = await client.hear()
            if isinstance(message, bytes):
                continue
            if message["type"] == "error":
                assert message["code"] == "server_full", message
                return None
            if message["type"] == "session.done":
                assert message["stopped"] is False
                return client.video


@asynccontextmanager
async def honest_client(server: LocalServer) -> AsyncIterator[list[bytes | None]]:
    """Watch the honest session, again and again, until the block ends."""
    videos: list[bytes | None] = []
    ending = asyncio.Event()

    async def watch() -> None:
        while not ending.is_set() or not any(videos):
            videos.append(await honest_video(server))
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    try:
        yield videos
    finally:
        ending.set()
        await asyncio.wait_for(watching, 120)


async def one_socket(server: LocalServer, spoiler: Spoiler) -> None:
    async with socket_client(server.url) as client:

        async def listen() -> None:
            while True:
                await client.hear()

        listening = asyncio.create_task(listen())
        try:
            await client.say(spoiler.start())
            for _ in range(PER_SOCKET - 1):
                await client.say(spoiler.control())
            await client.say({"type": "session.stop"})
            await asyncio.wait({listening}, timeout=20)
        except ConnectionClosed:
            pass
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


async def one_request(
    http: httpx.AsyncClient, spoiler: Spoiler, schema: dict, ids: list[str]
) -> None:
    template, methods = spoiler.random.choice(list(schema["paths"].items()))
    method = spoiler.random.choice([*methods, "head", "put"])
    body, kind = spoiler.body()
    headers = spoiler.headers() | ({"Content-Type": kind} if method in {"post", "put"} else {})
    content = body if method in {"post", "put"} else None
    path = spoiler.path(template, ids)
    answer = await http.request(method.upper(), path, headers=headers, content=content)
    documented = methods.get(method, {"responses": {}})["responses"]
    said = f"{method} {path} {headers} {body[:300]!r}: {answer.status_code} {answer.text[:300]}"
    assert answer.status_code < 500 or str(answer.status_code) in documented, said
    assert answer.status_code != 500, said
    assert answer.headers["X-Request-Id"], said
    if answer.status_code >= 400 and method != "head" and template != "/health":
        assert set(answer.json()) == {"error"}, said
    if method == "post" and answer.status_code == 200 and template == "/v1/videos":
        ids.append(answer.json()["id"])


@pytest.mark.parametrize(
    ("messages", "requests"),
    [(400, 150), pytest.param(SOCKET_MESSAGES, REQUESTS, marks=LONG)],
)
async def test_wrong_input_harms_nobody(messages, requests, caplog):
    caplog.set_level(logging.WARNING)
    with local_server(FakeExecutor(sessions=4)) as server:
        undisturbed = await honest_video(server)
        await asyncio.to_thread(wait_until, server.idle)
        process = psutil.Process()
        descriptors, tasks = process.num_fds(), server.num_tasks()
        async with (
            honest_client(server) as videos,
            httpx.AsyncClient(base_url=server.address, timeout=60, trust_env=False) as http,
        ):
            schema = (await http.get("/openapi.json")).json()
            ids: list[str] = []
            spoiler = Spoiler(Random(20))
            for _ in range(messages // PER_SOCKET):
                await one_socket(server, spoiler)
            for _ in range(requests):
                await one_request(http, spoiler, schema, ids)
        assert {video for video in videos if video is not None} == {undisturbed}
        await asyncio.to_thread(wait_until, server.idle)
        await asyncio.to_thread(wait_until, lambda: process.num_fds() <= descriptors + 2)
        await asyncio.to_thread(wait_until, lambda: server.num_tasks() <= tasks + 2)
        assert httpx.get(f"{server.address}/health").status_code == 200
    faults = [one.getMessage() for one in caplog.records if one.exc_info]
    assert faults == []
