"""A server that ends takes nobody new, and lets the worlds that live go on."""

import asyncio
import time

import pytest

from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.fixtures.carriers import carrier, carrier_flags, raylets
from tests.helpers.local_server import MODEL, local_server, wait_until
from tests.helpers.server import RealServer, real_server
from tests.helpers.socket_client import denied, play, socket_client, start_message
from vllm_omni.config.server import ServerConfig

__all__ = ["carrier", "carrier_flags", "raylets"]

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]

ENDLESS = start_message(num_frames=None, unbounded=True)
SIX_CHUNKS = 69
PACED = {"num_frames": SIX_CHUNKS, "max_lead_ms": 0}
"""Each chunk comes at the time when it is played: the last after 3.6 s."""


def is_draining(server: RealServer) -> bool:
    status, body = server.get("/health")
    return status == 503 and '"draining"' in body


class TestSigterm:
    async def test_worlds_go_on_to_their_end_or_to_the_limit_and_nobody_new_comes_in(
        self, carrier_flags
    ):
        limit_s = 25.0 if carrier_flags else 12.0  # Ray's own processes take their share.
        flags = ("--drain-timeout", str(limit_s), "--max-num-seqs", "2")
        with real_server(*flags, *carrier_flags) as server:
            expected = await play(server.url, num_frames=SIX_CHUNKS)
            async with (
                socket_client(server.url) as client,
                socket_client(server.url) as endless,
                socket_client(server.url) as waiting,
            ):
                await endless.say(ENDLESS | {"max_lead_ms": 0})
                await endless.chunk()
                await client.say(start_message(**PACED))
                await client.chunk()
                await waiting.say(start_message(queue=True))
                await waiting.expect("session.queued")
                began = time.monotonic()
                server.process.terminate()
                server.wait(lambda: is_draining(server), "waiting for the drain")
                status, error = await denied(server.url)
                assert (status, error["type"]) == (503, "server_draining")
                assert server.get("/ping")[0] == 200
                assert client.log.count("session.done") == 0
                await client.rest()
                # Bitwise: the encoder and the model see what they always see.
                assert client.video == expected
                assert (await waiting.rest())["chunks"] == 3
                assert time.monotonic() - began < limit_s
                error = await endless.error()
                assert time.monotonic() - began >= limit_s
                assert error["code"] == "server_draining"
                assert "shutting down" in error["message"]
                assert await endless.close_code() == 1000
            assert await asyncio.to_thread(server.process.wait, 20) == 0
            assert "Traceback" not in server.log


class TestHandshakes:
    async def test_a_full_server_denies_them_when_asked_to(self):
        config = ServerConfig((MODEL,), refuse_when_full=True)
        with local_server(FakeExecutor(), config=config, max_queued=1) as server:
            async with socket_client(server.url) as client, socket_client(server.url) as waiting:
                await client.say(ENDLESS)
                await client.chunk()
                await waiting.say(start_message(queue=True))
                await waiting.expect("session.queued")
                status, error = await denied(server.url)
                assert (status, error["type"]) == (503, "server_full")
                assert "max_queued" in error["message"]
                await client.say({"type": "session.stop"})
                await client.rest()
                await waiting.rest()
            wait_until(server.idle)
            assert await play(server.url)
            refused = server.engine.metrics.registry.get_sample_value(
                "vllm_omni:requests_refused_total", {"model_name": MODEL, "reason": "server_full"}
            )
            assert refused == 1

    async def test_without_a_line_the_last_place_is_still_given(self):
        config = ServerConfig((MODEL,), refuse_when_full=True)
        with local_server(FakeExecutor(sessions=2), config=config, max_queued=0) as server:
            async with socket_client(server.url) as one, socket_client(server.url) as two:
                for client in (one, two):
                    await client.say(ENDLESS)
                    await client.chunk()
                assert (await denied(server.url))[0] == 503

    async def test_a_server_that_was_not_asked_to_says_it_on_the_socket(self):
        with local_server(FakeExecutor(), max_queued=0) as server:
            async with socket_client(server.url) as client, socket_client(server.url) as late:
                await client.say(ENDLESS)
                await client.chunk()
                await late.say(start_message())
                assert (await late.error())["code"] == "server_full"
