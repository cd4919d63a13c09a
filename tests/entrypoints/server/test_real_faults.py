"""Faults in a real server's workers: one session pays, the others and the server go on."""

import asyncio
import time

import psutil
import pytest

from tests.helpers.faulty_serve import fault_prompt
from tests.helpers.mark import advanced
from tests.helpers.server import FAULTY, RealServer, real_server, tiny_server
from tests.helpers.socket_client import SocketClient, play, socket_client, start_message

__all__ = ["tiny_server"]

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.omni,
    pytest.mark.parallel,
    pytest.mark.cpu,
    pytest.mark.timing,
]

ENDLESS = start_message(num_frames=None, unbounded=True)


async def fail(client: SocketClient, **changes: object) -> dict:
    """Play until the error; the socket must close properly after it."""
    await client.say(start_message(**changes))
    error = await client.error()
    assert await client.close_code() == 1000
    return error


def held_bytes(server: RealServer) -> float:
    return server.metric("kv_used_bytes")


class TestOneChunkFails:
    @pytest.mark.parametrize("place", ["open", "probe", "decode", "commit"])
    @pytest.mark.parametrize("kind", ["oom", advanced("bug")])
    async def test_one_session_ends_and_another_goes_on(self, tiny_server, kind, place):
        server = tiny_server
        chunk = 0 if place == "open" else 1
        expected = await play(server.url)
        async with socket_client(server.url) as failing:
            other = asyncio.create_task(play(server.url))
            error = await fail(failing, prompt=fault_prompt(kind, place, chunk))
        assert error.get("code") == {"oom": "out_of_memory", "bug": None}[kind]
        assert "secret" not in error["message"]
        assert "Traceback" not in error["message"]
        # Decode before commit: a chunk whose commit fails has left already.
        delivered = failing.log.count("binary")
        assert delivered == {"open": 0, "probe": 1, "decode": 1, "commit": 2}[place]
        # Bitwise: the session beside it and the one after it are as if alone.
        assert await other == expected
        assert await play(server.url) == expected
        assert server.health() == 200
        server.wait_idle()
        assert held_bytes(server) == 0

    async def test_the_log_has_what_the_client_is_not_told(self, tiny_server):
        async with socket_client(tiny_server.url) as client:
            await fail(client, prompt=fault_prompt("bug", "probe", 0))
        assert "injected secret" in tiny_server.log


class TestWorkerDies:
    async def test_clients_are_told_and_the_next_session_is_right(self, tiny_server):
        server = tiny_server
        expected = await play(server.url)
        restarts = server.metric("worker_restarts_total")
        async with (
            socket_client(server.url) as failing,
            socket_client(server.url) as beside,
            socket_client(server.url) as waiting,
        ):
            await beside.say(ENDLESS)
            await beside.chunk()
            await failing.say(start_message(prompt=fault_prompt("die", "probe", 1)))
            await failing.expect("video.start")
            await waiting.say(start_message())
            await waiting.expect("video.start")
            for client in (failing, beside):
                error = await client.error()
                assert error["code"] == "worker_restarted"
                assert await client.close_code() == 1000
            assert failing.log.count("binary") == 1
            assert server.health() == 503
            # The one in line is served by the new workers. Bitwise.
            await waiting.rest()
            assert waiting.video == expected
        server.wait_ready()
        assert await play(server.url) == expected
        assert server.metric("worker_restarts_total") == restarts + 1

    async def test_one_that_dies_while_it_opens_a_session_is_restarted_once(self, tiny_server):
        server = tiny_server
        restarts = server.metric("worker_restarts_total")
        async with socket_client(server.url) as failing, socket_client(server.url) as waiting:
            await failing.say(start_message(prompt=fault_prompt("die", "open", 0)))
            assert (await failing.error())["code"] == "worker_restarted"
            status, body = server.get("/health")
            assert status == 200 or "restarting" in body  # a group comes back within a second
            await waiting.say(start_message())
            await waiting.rest()
        server.wait_ready()
        assert server.metric("worker_restarts_total") == restarts + 1


class TestShutdown:
    @pytest.mark.advanced_model
    async def test_sigterm_in_a_session_and_with_a_client_that_does_not_read(self):
        with real_server("--max-num-seqs", "2") as server:
            async with (
                socket_client(server.url) as client,
                socket_client(server.url, max_queue=1, close_timeout=0.1) as silent,
            ):
                await silent.say(ENDLESS)
                await silent.expect("video.start")
                await client.say(ENDLESS)
                await client.chunk()
                began = time.monotonic()
                server.process.terminate()
                assert "shutting down" in (await client.error())["message"]
                assert await client.close_code() == 1000
                assert await asyncio.to_thread(server.process.wait, 30) == 0
                assert time.monotonic() - began < 30
            assert "Traceback" not in server.log

    def test_sigterm_while_loading(self):
        with real_server(wait=False) as server:
            server.wait(lambda: server.health() == 503, "waiting for the port")
            began = time.monotonic()
            assert server.terminate() == 0
            assert time.monotonic() - began < 30
            assert "Traceback" not in server.log

    async def test_sigterm_with_a_client_that_waits_for_the_loading(self):
        with real_server(wait=False) as server:
            server.wait(lambda: server.health() == 503, "waiting for the port")
            async with socket_client(server.url) as client:
                await client.say(start_message(queue=True))
                await client.expect("session.queued")
                began = time.monotonic()
                server.process.terminate()
                assert "shutting down" in (await client.error())["message"]
                # At once: a fraction of the 18 s that running chunks are given.
                assert time.monotonic() - began < 5
                assert await client.close_code() == 1000
            assert await asyncio.to_thread(server.process.wait, 30) == 0
            assert "Traceback" not in server.log

    async def test_sigterm_when_the_worker_hangs(self):
        with real_server("--shutdown-timeout", "4", program=FAULTY) as server:
            async with socket_client(server.url) as client:
                await client.say(start_message(prompt=fault_prompt("hang", "probe", 0)))
                await client.expect("video.start")
                workers = workers_of(server)
                assert len(workers) == 1
                began = time.monotonic()
                assert await asyncio.to_thread(server.terminate) == 0
                # The limit, and ten seconds in which a worker may end by itself.
                assert time.monotonic() - began < 25
            _, alive = psutil.wait_procs(workers, timeout=10)
            assert not alive, [process.cmdline() for process in alive]


def workers_of(server: RealServer) -> list[psutil.Process]:
    """The processes that hold a model: children of the fork server."""
    return [grandchild for child in server.api.children() for grandchild in child.children()]
