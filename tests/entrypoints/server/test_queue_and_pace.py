"""Sessions that wait for a place, that never end, that are paced, and that are not read."""

import asyncio
import socket as sockets

import pytest

from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.local_server import local_server, wait_until
from tests.helpers.socket_client import SocketClient, socket_client, start_message
from vllm_omni.entrypoints.server.realtime_video import Timers

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]

ENDLESS = start_message(num_frames=None, unbounded=True)
STOP = {"type": "session.stop"}


async def occupy(server, client: SocketClient) -> None:
    """Hold the only place, in the middle of a chunk."""
    server.executor.gate.clear()
    await client.say(ENDLESS)
    await client.expect("video.start")
    await asyncio.to_thread(wait_until, lambda: server.executor.open_ids)


class TestLine:
    async def test_positions_come_before_video_start_and_each_only_once(self):
        with local_server() as server:
            async with (
                socket_client(server.url) as running,
                socket_client(server.url) as second,
                socket_client(server.url) as third,
            ):
                await occupy(server, running)
                await second.say(start_message(queue=True))
                assert (await second.expect("session.queued"))["position"] == 1
                await third.say(start_message(queue=True))
                assert (await third.expect("session.queued"))["position"] == 2
                await running.say(STOP)
                server.executor.gate.set()
                await second.expect("video.start")
                assert (await second.rest())["chunks"] == 3
                assert (await third.expect("session.queued"))["position"] == 1
                await third.expect("video.start")
                assert (await third.rest())["chunks"] == 3
                assert third.log.count("session.queued") == 2

    async def test_a_client_that_did_not_ask_just_waits_after_video_start(self):
        with local_server() as server:
            async with socket_client(server.url) as running, socket_client(server.url) as waiting:
                await occupy(server, running)
                await waiting.say(start_message())
                await waiting.expect("video.start")
                await waiting.say({"type": "session.ping"})
                await waiting.expect("session.pong")
                await running.say(STOP)
                server.executor.gate.set()
                assert (await waiting.rest())["chunks"] == 3
                assert "session.queued" not in waiting.log

    async def test_a_full_line_refuses_with_a_code(self):
        with local_server(max_queued=1) as server:
            async with (
                socket_client(server.url) as running,
                socket_client(server.url) as waiting,
                socket_client(server.url) as refused,
            ):
                await occupy(server, running)
                await waiting.say(start_message(queue=True))
                await waiting.expect("session.queued")
                await refused.say(start_message(queue=True))
                error = await refused.expect("error")
                assert error["code"] == "server_full"
                assert "1 of 1 wait" in error["message"]
                assert await refused.close_code() == 1000

    @pytest.mark.parametrize("queue", [True, False])
    async def test_stop_while_waiting_does_not_wait_for_a_chunk(self, queue):
        with local_server() as server:
            async with socket_client(server.url) as running, socket_client(server.url) as waiting:
                await occupy(server, running)
                await waiting.say(start_message(queue=queue))
                await waiting.expect("session.queued" if queue else "video.start")
                await asyncio.to_thread(wait_until, lambda: server.engine.num_sessions == 2)
                await waiting.say(STOP)
                done = await waiting.expect("session.done")
                assert (done["chunks"], done["stopped"]) == (0, True)
                assert await waiting.close_code() == 1000
                server.executor.gate.set()
            await asyncio.to_thread(wait_until, server.idle)
            assert server.executor.opened_total == 1

    async def test_interactions_and_resets_must_wait_for_video_start(self):
        with local_server() as server:
            async with socket_client(server.url) as running, socket_client(server.url) as waiting:
                await occupy(server, running)
                await waiting.say(start_message(queue=True))
                await waiting.expect("session.queued")
                await waiting.say({"type": "session.reset"})
                assert "wait_video" in (await waiting.expect("error"))["message"]
                server.executor.gate.set()


class TestLength:
    async def test_unbounded_runs_until_stop(self):
        with local_server() as server:
            async with socket_client(server.url) as client:
                await client.say(ENDLESS)
                indices = [(await client.chunk())[0]["generation_chunk_index"] for _ in range(20)]
                assert indices == list(range(20))
                await client.say(STOP)
                assert (await client.rest())["stopped"]

    async def test_unbounded_excludes_a_length(self):
        with local_server() as server:
            async with socket_client(server.url) as client:
                await client.say(start_message(unbounded=True))
                assert "unbounded excludes" in (await client.expect("error"))["message"]

    async def test_a_missing_length_is_asked_for_with_the_alternative(self):
        with local_server() as server:
            async with socket_client(server.url) as client:
                await client.say(start_message(num_frames=None))
                message = (await client.error())["message"]
        assert message.startswith("num_frames: is required: a rollout has 9 + 12k pixel frames")
        assert message.endswith("or give unbounded: true for an endless world")


class TestPace:
    async def test_lead_limits_how_far_generation_runs_ahead(self):
        # At 120 fps a chunk of 12 frames plays 100 ms, the first 75 ms.
        with local_server() as server:
            async with socket_client(server.url) as client:
                await client.say(start_message(num_frames=69, fps=120, max_lead_ms=50))
                ready_ms = [(await client.chunk())[0]["server_ready_ms"] for _ in range(6)]
        # Chunk 5 is due 475 ms after chunk 0 was ready and may come 50 ms earlier.
        assert ready_ms[5] - ready_ms[0] >= 475 - 50
        ready = [plan.chunk_index for plan in server.executor.plans]
        assert ready == list(range(6))

    async def test_without_a_lead_chunks_come_as_they_are_made(self):
        with local_server() as server:
            async with socket_client(server.url) as client:
                await client.say(start_message(num_frames=69, fps=1))
                await client.until("session.done", 30)  # 69 seconds of video


class TestSlowReader:
    async def test_it_pauses_its_session_and_no_other_one_and_is_closed(self):
        # 480x832 noise is large: a few chunks fill the socket.
        timers = Timers(stall=1.0, poll=0.05)
        with local_server(FakeExecutor(sessions=2, noise=True), timers=timers) as server:
            receiver = sockets.socket()
            receiver.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
            receiver.connect(("127.0.0.1", server.port))
            async with (
                socket_client(server.url, sock=receiver, max_queue=1, close_timeout=0.1) as slow,
                socket_client(server.url) as other,
            ):
                await slow.say(ENDLESS)
                await slow.expect("video.start")
                await other.say(start_message(num_frames=117))
                assert (await other.rest())["chunks"] == 10
                await asyncio.to_thread(wait_until, lambda: server.engine.num_sessions == 0)
                made = max(plan.chunk_index for plan in server.executor.plans)
                await asyncio.sleep(0.2)
                assert made == max(plan.chunk_index for plan in server.executor.plans)
                # It reads again and finds out why.
                error = await slow.error()
                assert error["code"] == "client_too_slow"
                assert await slow.close_code() == 1000
            await asyncio.to_thread(wait_until, server.idle)

    async def test_pings_do_not_keep_it(self):
        timers = Timers(stall=0.5, poll=0.05)
        with local_server(FakeExecutor(noise=True), timers=timers) as server:
            receiver = sockets.socket()
            receiver.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
            receiver.connect(("127.0.0.1", server.port))
            async with socket_client(
                server.url, sock=receiver, max_queue=1, close_timeout=0.1
            ) as slow:
                await slow.say(ENDLESS)
                await slow.expect("video.start")
                for _ in range(15):
                    await slow.say({"type": "session.ping"})
                    await asyncio.sleep(0.1)
                await asyncio.to_thread(wait_until, lambda: server.engine.num_sessions == 0)

    async def test_one_that_never_reads_the_end_is_cut_off(self, monkeypatch):
        monkeypatch.setattr("vllm_omni.entrypoints.server.wire_protocols._CUT_OFF_S", 0.3)
        monkeypatch.setattr("vllm_omni.entrypoints.server.channel._CLOSE_TIMEOUT_S", 0.2)
        timers = Timers(stall=0.5, poll=0.05)
        with local_server(FakeExecutor(noise=True), timers=timers) as server:
            receiver = sockets.socket()
            receiver.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
            receiver.connect(("127.0.0.1", server.port))
            async with socket_client(
                server.url, sock=receiver, max_queue=1, close_timeout=0.1
            ) as slow:
                await slow.say(ENDLESS)
                await slow.expect("video.start")
                await asyncio.to_thread(wait_until, lambda: not server.connections)
            assert server.idle()
