"""A client that reads nothing stops its world soon, and nobody's memory grows by it."""

import asyncio
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from tests.deploy.haproxy import haproxy, needs_haproxy
from tests.deploy.pods import Pod, large_world, pod
from tests.helpers.socket_client import socket_client

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]

ENDLESS = large_world("13M", num_frames=None, unbounded=True, max_lead_ms=0)
"""Between two chunks, which are made when they are due, one sees what the world holds."""
MOST_FRAMES = 10
MOST_GROWTH_BYTES = 10 * 2**20
"""What a world may come to hold once its encoder has made a chunk; pixels of one are 14.4 MB."""


def small_socket(url: str) -> socket.socket:
    """A connection that keeps a megabyte of what its client does not read."""
    place = urlsplit(url)
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
    made.connect((place.hostname, place.port))
    made.setblocking(False)
    return made


async def check(url: str, server: Pod, growing: list) -> None:
    """Start a world and read nothing of its video until it has ended."""
    seen: list[tuple[int, list[int]]] = []

    def sizes() -> list[int]:
        return [process.resident_bytes for process in growing]

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(120.0):
            while not await asyncio.to_thread(condition):
                chunks = await asyncio.to_thread(server.count, "chunks_total")
                seen.append((chunks, sizes()))
                await asyncio.sleep(0.1)

    # The client's own library takes one message and no more off the socket, the system a megabyte.
    async with socket_client(url, max_queue=1, sock=small_socket(url)) as client:
        await client.say(ENDLESS)
        await client.expect("video.start")
        await until(lambda: server.count("requests_failed_total") == 1)
        made = server.count("chunks_total")
        begun = [now for chunks, now in seen if 0 < chunks < 3]
        # While the world stands still; at first its latest chunk is still being encoded.
        still = [now for chunks, now in seen if chunks == made]
        least = map(min, zip(*begun, strict=True))
        most = map(max, zip(*still[len(still) // 2 :], strict=True))
        grown = [now - before for now, before in zip(most, least, strict=True)]
        print(f"{made} chunks, grown by {grown} bytes")
        assert (await client.error())["code"] == "client_too_slow"
        # The bound of ten is one of frames of a megabyte, as 832x480 has them at their worst.
        assert len(client.video) / client.log.count("binary") > 1e6
        assert client.log.count("binary") <= MOST_FRAMES
        assert made <= MOST_FRAMES + 2  # two more wait in the server
        assert max(grown) <= MOST_GROWTH_BYTES


async def test_bare():
    with pod() as server:
        await check(server.url, server, [server])


@needs_haproxy
async def test_through_haproxy():
    with pod() as server:
        target = f"127.0.0.1:{server.port}"
        with haproxy(target, target) as proxy:
            await check(proxy.url, server, [server, proxy])
