"""What each way to go and to end is counted as, and what the log says about it."""

import asyncio
import logging
import re

import pytest

from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.local_server import MODEL, LocalServer, local_server, wait_until
from tests.helpers.outcomes import outcomes
from tests.helpers.socket_client import SocketClient, socket_client, start_message
from tests.helpers.socket_fixtures import QUICK, server, unpainted_server
from vllm_omni.entrypoints.server.channel import ClientTooSlowError, SocketChannel
from vllm_omni.errors import DeviceOutOfMemoryError

__all__ = ["server", "unpainted_server"]

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]

ENDLESS = start_message(num_frames=None, unbounded=True)
STOP = {"type": "session.stop"}


async def counted(server: LocalServer) -> dict[str, float]:
    """Everything that was counted once nothing is left of any socket."""
    await asyncio.to_thread(wait_until, server.idle)
    return outcomes(server.engine.metrics, MODEL)


async def began(client: SocketClient) -> None:
    await client.say(ENDLESS)
    await client.chunk()


async def leave(client: SocketClient) -> None:
    client.socket.transport.abort()


class TestSessions:
    async def test_a_finished_one(self, server):
        async with socket_client(server.url) as client:
            await client.say(start_message())
            await client.rest()
        assert await counted(server) == {"success finished": 1}

    async def test_a_stopped_one(self, server):
        async with socket_client(server.url) as client:
            await began(client)
            await client.say(STOP)
            await client.rest()
        assert await counted(server) == {"success stopped": 1}

    async def test_a_client_that_leaves(self, server):
        async with socket_client(server.url) as client:
            await began(client)
            await leave(client)
        assert await counted(server) == {"failed client_disconnect": 1}

    async def test_a_stall(self):
        with local_server(timers=QUICK) as server:
            server.executor.gate.clear()
            async with socket_client(server.url) as client:
                await client.say(ENDLESS)
                assert "Stall timeout" in (await client.error())["message"]
                await client.rest()
            server.executor.gate.set()
            assert await counted(server) == {"failed stage_error": 1}

    async def test_a_client_that_does_not_read(self, server, monkeypatch):
        async def timed_out(*_: object) -> None:
            raise ClientTooSlowError("the client did not read")

        monkeypatch.setattr(SocketChannel, "send_chunk", timed_out)
        async with socket_client(server.url) as client:
            await client.say(ENDLESS)
            assert (await client.error())["code"] == "client_too_slow"
        assert await counted(server) == {"failed client_disconnect": 1}

    async def test_a_broken_encoder(self, server, monkeypatch):
        def broken(*_: object) -> bytes:
            raise ZeroDivisionError("secret")

        monkeypatch.setattr("vllm_omni.outputs.media.ChunkEncoder.encode", broken)
        async with socket_client(server.url) as client:
            await client.say(ENDLESS)
            await client.error()
        assert await counted(server) == {"failed unknown": 1}

    async def test_a_failed_chunk(self, server):
        server.executor.failures[0, 1] = DeviceOutOfMemoryError("no memory")
        async with socket_client(server.url) as client:
            await client.say(ENDLESS)
            await client.error()
        assert await counted(server) == {"failed stage_error": 1}

    async def test_a_server_that_shuts_down(self, server):
        async with socket_client(server.url) as client:
            await began(client)
            server.engine.drain()
            await client.error()
        assert await counted(server) == {"failed unknown": 1}

    @pytest.mark.parametrize(
        ("end", "outcome"),
        [("stop", "success stopped"), ("leave", "failed client_disconnect")],
    )
    async def test_one_that_ends_before_it_is_open(self, unpainted_server, end, outcome):
        async with socket_client(unpainted_server.url) as client:
            await client.say(ENDLESS)
            await client.expect("video.start")
            if end == "stop":
                await client.say(STOP)
                await client.rest()
            else:
                await leave(client)
        assert await counted(unpainted_server) == {outcome: 1}


class TestRefusals:
    async def test_a_probe_that_asks_for_nothing_is_not_counted(self, server):
        async with socket_client(server.url):
            pass
        async with socket_client(server.url) as client:
            await leave(client)
        assert await counted(server) == {}

    @pytest.mark.parametrize(
        "message", ["no json", start_message(model="another"), start_message(num_frames=10)]
    )
    async def test_a_request_that_cannot_be_served(self, server, message):
        async with socket_client(server.url) as client:
            await client.say(message)
            await client.error()
        assert await counted(server) == {"refused invalid_request": 1}

    async def test_a_full_line(self):
        with local_server(max_queued=0) as server:
            async with socket_client(server.url) as running, socket_client(server.url) as late:
                await began(running)
                await late.say(start_message())
                assert (await late.error())["code"] == "server_full"
                await running.say(STOP)
                await running.rest()
            assert await counted(server) == {"success stopped": 1, "refused server_full": 1}

    async def test_a_window_that_never_fits(self, server):
        async with socket_client(server.url) as client:
            await client.say(start_message(width=832, height=480))
            assert (await client.error())["code"] == "out_of_memory"
        assert await counted(server) == {"refused out_of_memory": 1}

    async def test_a_server_that_shuts_down(self, server):
        server.engine.drain()
        async with socket_client(server.url) as client:
            await client.say(start_message())
            await client.error()
        assert await counted(server) == {"refused unavailable": 1}


class TestLog:
    async def test_the_client_can_find_its_session(self, server, caplog):
        caplog.set_level(logging.INFO, logger="vllm_omni")
        async with socket_client(server.url) as client:
            await client.say(start_message())
            request_id = (await client.expect("video.start"))["request_id"]
            await client.rest()
        await asyncio.to_thread(wait_until, server.idle)
        lines = [record.message for record in caplog.records if request_id in record.message]
        assert [re.sub(r"\(.*?\)|[\d.]+ s", "", line) for line in lines] == [
            f"{request_id}  placed after : 96x64, 3 chunks",
            f"{request_id}  ended: finished, 3 chunks in ",
        ]

    async def test_and_why_it_was_refused(self, server, caplog):
        caplog.set_level(logging.INFO, logger="vllm_omni")
        async with socket_client(server.url) as client:
            await client.say(start_message(num_frames=10))
            request_id = (await client.expect("error"))["request_id"]
        await asyncio.to_thread(wait_until, server.idle)
        (line,) = [record.message for record in caplog.records if request_id in record.message]
        assert line.startswith(f"{request_id} refused: num_frames: ")


class TestPace:
    async def test_a_slow_server_misses_the_deadlines_of_a_socket(self):
        # At 1000 fps a chunk plays 9 or 12 ms, and takes 50 ms to make. The second is late in any
        # case; the third is no miss if the client has not taken the first one until then.
        with local_server(FakeExecutor(chunk_s=0.05)) as server:
            async with socket_client(server.url) as client:
                await client.say(start_message(fps=1000))
                await client.rest()
            metrics = server.engine.metrics.registry
            labels = {"model_name": MODEL}
            assert metrics.get_sample_value("vllm_omni:deadline_misses_total", labels) in {1, 2}
