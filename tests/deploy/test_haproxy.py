"""The shipped configuration of HAProxy: who goes where, what is kept, what is never cut."""

from contextlib import AsyncExitStack, ExitStack

import pytest

from tests.deploy.haproxy import haproxy, needs_haproxy
from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.local_server import MODEL, LocalServer, local_server
from tests.helpers.socket_client import SocketClient, play, socket_client, start_message
from vllm_omni.config.server import ServerConfig

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.omni,
    pytest.mark.cpu,
    needs_haproxy,
    pytest.mark.timing,
]

ENDLESS = start_message(num_frames=None, unbounded=True, max_lead_ms=0, fps=60)
WITH_503 = ServerConfig((MODEL,), refuse_when_full=True)


def host(pod: LocalServer) -> str:
    return f"127.0.0.1:{pod.port}"


@pytest.fixture
def pods():
    """Three pods of one place and no line."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(local_server(FakeExecutor(), config=WITH_503, max_queued=0))
            for _ in range(3)
        ]


def counts(pods: list[LocalServer]) -> list[int]:
    return [pod.engine.num_sessions for pod in pods]


async def begin(client: SocketClient) -> None:
    await client.say(ENDLESS)
    await client.chunk()


async def test_viewers_go_where_a_place_is_and_a_new_pod_joins_without_a_cut(pods):
    with haproxy(host(pods[0]), host(pods[1])) as proxy:
        expected = await play(pods[0].url)
        assert await play(proxy.url) == expected  # bitwise, through the proxy
        async with (
            socket_client(proxy.url) as one,
            socket_client(proxy.url) as two,
            AsyncExitStack() as later,
        ):
            await begin(one)
            await begin(two)
            assert counts(pods) == [1, 1, 0]
            added = proxy.tell(f"add server pods/pod3 {host(pods[2])} check inter 1s rise 1 fall 2")
            assert "registered" in added
            proxy.tell("enable health pods/pod3; enable server pods/pod3")
            proxy.wait(pod3="UP")
            three = await later.enter_async_context(socket_client(proxy.url))
            await begin(three)
            assert counts(pods) == [1, 1, 1]
            for client in (one, two, three):
                await client.chunk()
        assert proxy.process.poll() is None


async def test_a_full_pod_denies_the_handshake_and_the_proxy_tries_another(pods):
    """A world that the proxy does not know of makes pod 1 full, though it looks empty to it."""
    with haproxy(host(pods[0]), host(pods[1])) as proxy:
        async with socket_client(pods[0].url) as hidden, AsyncExitStack() as later:
            await begin(hidden)
            for _ in range(2):
                client = await later.enter_async_context(socket_client(proxy.url))
                await begin(client)
                assert counts(pods) == [1, 1, 0]
                await client.say({"type": "session.stop"})
                await client.rest()


async def test_a_pod_that_drains_keeps_its_world_and_gets_nobody(pods):
    with haproxy(host(pods[0]), host(pods[1])) as proxy:
        async with socket_client(proxy.url) as staying:
            await begin(staying)
            draining = counts(pods).index(1)
            pods[draining].engine.close_admission()
            proxy.wait(**{f"pod{draining + 1}": "DOWN"})
            async with socket_client(proxy.url) as other:
                await begin(other)
                assert counts(pods)[1 - draining] == 1
                await staying.chunk()
            await staying.say({"type": "session.stop"})
            await staying.rest()


async def test_the_address_of_the_client_and_the_host_are_kept(pods, caplog):
    with haproxy(host(pods[0]), host(pods[1])) as proxy:
        # A page of the proxy's own origin, on a machine with another address.
        origin = f"http://127.0.0.1:{proxy.port}"
        async with socket_client(proxy.url, origin=origin, local_addr=("127.0.0.9", 0)) as client:
            await client.say(start_message())
            await client.rest()
    seen = [str(record.args) for record in caplog.records if record.name.startswith("uvicorn")]
    assert any("127.0.0.9" in one for one in seen)
