"""Many sessions in a row leave nothing behind; a control never misses the next chunk."""

import asyncio
import os
import random
import time

import psutil
import pytest

from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.local_server import local_server, wait_until
from tests.helpers.mark import advanced
from tests.helpers.server import RealServer, tiny_server
from tests.helpers.socket_client import SocketClient, camera_event, socket_client, start_message

__all__ = ["tiny_server"]

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.omni,
    pytest.mark.parallel,
    pytest.mark.cpu,
    pytest.mark.timing,
]

ENDLESS = start_message(num_frames=None, unbounded=True)
MIB = 2**20
RSS_LIMIT_BYTES = 5 * MIB
SAMPLES, SAMPLED_SESSIONS = 3, 4
"""Allocators keep some freed memory for a while: it is back if one of the last looks says so."""


def repeated(default: int, soak: int) -> list:
    """Values of a count: a short one for every run, a long one for ``make soak``."""
    return [default, pytest.param(soak, marks=pytest.mark.soak)]


async def visit(url: str, number: int) -> None:
    """Open, three chunks, close; every fourth client vanishes in the middle of a chunk."""
    async with socket_client(url) as client:
        await client.say(ENDLESS)
        await client.chunk()
        if number % 4 == 3:
            client.socket.transport.abort()
            return
        await client.chunk()
        await client.chunk()
        if number % 4 == 2:
            await client.say({"type": "session.stop"})
            await client.rest()


async def play(url: str) -> bytes:
    async with socket_client(url) as client:
        await client.say(start_message())
        await client.rest()
        return client.video


class Belongings:
    """What a server holds while no session is open."""

    def __init__(self, server: RealServer) -> None:
        server.wait_idle()
        family = [server.api, *server.api.children(recursive=True)]
        self.rss_bytes = {p.pid: p.memory_info().rss for p in family}
        self.threads = {p.pid: p.num_threads() for p in family}
        self.descriptors = {p.pid: p.num_fds() for p in family}
        self.shared_memory = set(os.listdir("/dev/shm"))
        self.kv_used_bytes = server.metric("kv_used_bytes")
        self.running = server.metric("num_requests_running")


async def visit_and_look(server: RealServer) -> list[Belongings]:
    """Some sessions, with a look at the server now and then."""
    looks = []
    for number in range(SAMPLES * SAMPLED_SESSIONS):
        await visit(server.url, number)
        if number % SAMPLED_SESSIONS == SAMPLED_SESSIONS - 1:
            await asyncio.sleep(0.2)
            looks.append(Belongings(server))
    return looks


@pytest.mark.parametrize(
    "sessions",
    [advanced(20), pytest.param(200, marks=pytest.mark.soak)],
)
async def test_sessions_leave_nothing_behind(tiny_server, sessions):
    server = tiny_server
    expected = await play(server.url)
    await visit_and_look(server)
    before = await visit_and_look(server)
    for number in range(sessions - SAMPLES * SAMPLED_SESSIONS):
        await visit(server.url, number)
    after = await visit_and_look(server)
    family = set(before[-1].rss_bytes)
    assert all(set(look.rss_bytes) == family for look in after), "a process came or went"
    growth = {
        pid: min(look.rss_bytes[pid] for look in after)
        - max(look.rss_bytes[pid] for look in before)
        for pid in family
    }
    print(f"{sessions} sessions: RSS grew by {[round(b / MIB, 2) for b in growth.values()]} MiB")
    assert max(growth.values()) < RSS_LIMIT_BYTES
    first, last = before[-1], after[-1]
    for pid in family:  # a look may meet the connection of the look before it
        most_threads = max(look.threads[pid] for look in before)
        most_descriptors = max(look.descriptors[pid] for look in before)
        assert min(look.threads[pid] for look in after) <= most_threads
        assert min(look.descriptors[pid] for look in after) <= most_descriptors
    assert not {name for name in last.shared_memory - first.shared_memory if "vllm" in name}
    assert (last.kv_used_bytes, last.running) == (0, 0)
    # Bitwise: the next session is like the first.
    assert await play(server.url) == expected


@pytest.mark.parametrize("sessions", repeated(20, 200))
async def test_no_task_is_left(sessions):
    with local_server(FakeExecutor(chunk_s=0.01)) as server:
        await visit(server.url, 0)
        await asyncio.to_thread(wait_until, lambda: server.idle() and not server.connections)
        before, threads = server.num_tasks(), psutil.Process().num_threads()
        for number in range(sessions):
            await visit(server.url, number)
        await asyncio.to_thread(wait_until, lambda: server.idle() and not server.connections)
        # The pool of media threads fills up to its size.
        assert psutil.Process().num_threads() <= threads + 8
        await asyncio.to_thread(wait_until, lambda: server.num_tasks() <= before)
        assert server.executor.opened_total == server.executor.closed_total == sessions + 1


class Control:
    """Sends events at random phases of a chunk and notes when."""

    def __init__(self, client: SocketClient) -> None:
        self._client = client
        self.chunks: list[dict] = []

    async def send(self, event_id: str) -> tuple[float, float, int]:
        """Send one; before which and after which time it arrived, and the chunk that shows it."""
        sent_s = time.monotonic()
        await self._client.say(camera_event(event_id))
        acknowledged_s = 0.0
        while True:
            message = await self._client.hear()
            if isinstance(message, bytes):
                continue
            if message["type"] == "session.interaction.queued":
                acknowledged_s = time.monotonic()
            else:
                assert message["type"] == "video.chunk_metadata", message
                self.chunks.append(message)
                if event_id in message["started_event_ids"]:
                    return sent_s, acknowledged_s, message["generation_chunk_index"]


@pytest.mark.parametrize("controls", repeated(60, 200))
async def test_a_control_shows_in_the_next_chunk_that_starts(controls):
    phase = random.Random(1)
    with local_server(FakeExecutor(chunk_s=0.03)) as server:
        async with socket_client(server.url) as client:
            await client.say(ENDLESS)
            await client.chunk()
            control = Control(client)
            seen = []
            for number in range(controls):
                await asyncio.sleep(phase.uniform(0, 0.06))
                seen.append(await control.send(f"e{number}"))
        began_s = {p.chunk_index: at for p, at in zip(server.executor.plans,
                   server.executor.began_s, strict=True)}  # fmt: skip
    for sent_s, acknowledged_s, chunk in seen:
        # Not before it was sent, and no chunk that was begun after its arrival goes without it.
        # 20 ms: a chunk counts as begun when the executor gets it, a moment after it was planned.
        assert began_s[chunk] >= sent_s
        assert began_s[chunk - 1] <= acknowledged_s + 0.02


@pytest.mark.parametrize("controls", repeated(20, 200))
async def test_a_control_shows_in_time_on_a_real_server(tiny_server, controls):
    phase = random.Random(2)
    async with socket_client(tiny_server.url) as client:
        await client.say(ENDLESS)
        await client.expect("video.start")
        started_s = time.monotonic()
        await client.chunk()
        control = Control(client)
        seen = []
        for number in range(controls):
            await asyncio.sleep(phase.uniform(0, 0.3))
            seen.append(await control.send(f"e{number}"))
    ready_s = {
        chunk["generation_chunk_index"]: started_s + chunk["server_ready_ms"] / 1000
        for chunk in control.chunks
    }
    for sent_s, acknowledged_s, index in seen:
        # A chunk begins after the one before it was ready. 100 ms: both sides agree on when
        # video.start was sent only up to the time that it took to arrive.
        assert ready_s[index] >= sent_s - 0.1
        if index - 2 in ready_s:
            assert ready_s[index - 2] <= acknowledged_s + 0.1
