"""Several worker groups in one real server: one line, equal bytes, and losses that stay at home."""

import asyncio
import json

import httpx
import psutil
import pytest

from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.local_server import MODEL, local_server
from tests.helpers.loopback import OnLoopback
from tests.helpers.server import RealServer, real_server
from tests.helpers.socket_client import SocketClient, play, socket_client, start_message
from vllm_omni.config.server import ServerConfig

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.omni,
    pytest.mark.parallel,
    pytest.mark.cpu,
    pytest.mark.timing,
]

ENDLESS = start_message(num_frames=None, unbounded=True, max_lead_ms=0, queue=True)


def replicas(server: RealServer) -> list[dict]:
    return json.loads(server.get("/v1/replicas")[1])["data"]


def sessions(server: RealServer) -> list[int]:
    return [one["sessions"] for one in replicas(server)]


def workers(server: RealServer) -> list[psutil.Process]:
    """The processes that hold a model: children of each group's own fork server."""
    found = [worker for child in server.api.children() for worker in child.children()]
    return sorted(found, key=lambda one: one.create_time())


async def grow_to_three(server: RealServer, clients: tuple[SocketClient, ...]) -> None:
    """Each of three viewers in turn asks for a world; the second and third wait for a replica."""
    for ahead, client in enumerate(clients):
        await client.say(ENDLESS)
        if ahead == 0:
            await client.chunk()
        else:
            assert (await client.expect("session.queued"))["position"] == ahead
    for client in clients[1:]:
        await client.until("video.start", patience_s=90)
        await client.chunk()
    assert sessions(server) == [1, 1, 1]
    assert server.health() == 200


async def lose_one_of_three(
    server: RealServer, clients: tuple[SocketClient, ...]
) -> list[SocketClient]:
    """A killed worker ends the world that it made, and no other one; those are returned."""
    workers(server)[-1].kill()
    error = await asyncio.wait_for(_first_error(clients), 20)
    assert error["code"] == "worker_restarted"
    survivors = [client for client in clients if "error" not in client.log]
    assert len(survivors) == 2
    assert server.health() == 200
    for client in survivors:
        await client.chunk()
        await client.chunk()
    return survivors


@pytest.mark.advanced_model
async def test_one_replica_becomes_three_under_load_and_one_again_and_a_loss_stays_at_home():
    flags = ("--max-replicas", "3", "--max-num-seqs", "1", "--elastic-idle-s", "2")
    with real_server(*flags) as server:
        async with (
            socket_client(server.url) as first,
            socket_client(server.url) as second,
            socket_client(server.url) as third,
        ):
            await grow_to_three(server, (first, second, third))
            survivors = await lose_one_of_three(server, (first, second, third))
            undisturbed = [client.video for client in survivors]
        server.wait(lambda: len(replicas(server)) == 1, "waiting for idle replicas to end")
        assert server.metric("worker_restarts_total") == 1
        async with socket_client(server.url) as alone:
            await alone.say(ENDLESS | {"max_lead_ms": 60_000})
            while len(alone.video) < max(map(len, undisturbed)):
                await alone.chunk()
        # Bitwise: the same world, whoever else came, was lost or made room meanwhile.
        assert all(alone.video.startswith(video) for video in undisturbed)
        assert server.terminate() == 0
        assert "Traceback" not in server.log


async def _first_error(clients: tuple[SocketClient, ...]) -> dict:
    """The first error that any of them hears; the others go on reading where they are."""
    readers = [asyncio.create_task(client.error()) for client in clients]
    done, others = await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
    for reader in others:
        reader.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return done.pop().result()


async def test_two_replicas_make_the_bytes_of_one_for_four_viewers_at_once():
    flags = ("--omni-dp-size-local", "2", "--max-num-seqs", "2", "--admin-key", "operator")
    with real_server(*flags) as server:
        server.wait(
            lambda: [one["state"] for one in replicas(server)] == ["ready"] * 2,
            "waiting for both replicas",
        )
        together = await asyncio.gather(*(play(server.url, seed=seed) for seed in (1, 2, 1, 2)))
        assert [one["max_sessions"] for one in replicas(server)] == [2, 2]
        for number in ("0", "1"):
            assert server.metric("chunks_total", replica=number) > 0
        alone = [await play(server.url, seed=seed) for seed in (1, 2)]
        # Bitwise: no session sees the others, and every replica holds the same weights.
        assert together == alone * 2
        await drain_under_a_world(server, alone[0])
        assert server.terminate() == 0


async def drain_under_a_world(server: RealServer, whole: bytes) -> None:
    """An operator drains the replica of a world that has begun: it loses no byte of it."""
    async with socket_client(server.url) as staying:
        await staying.say(start_message(seed=1))
        await staying.until("video.start")
        server.wait(lambda: 1 in sessions(server), "waiting for a place")
        number = sessions(server).index(1)
        answer = await asyncio.to_thread(_drain, server, number, "operator")
        assert answer.status_code == 200
        assert [one["state"] for one in answer.json()["data"]].count("draining") == 1
        assert await play(server.url, seed=1) == whole
        await staying.rest()
    assert staying.video == whole
    server.wait(lambda: len(replicas(server)) == 1, "waiting for the drained replica")
    refused = await asyncio.to_thread(_drain, server, 1 - number, "operator")
    assert (refused.status_code, "the only one that serves" in refused.text) == (400, True)


def _drain(server: OnLoopback, number: int, key: str) -> httpx.Response:
    return httpx.post(
        f"{server.address}/admin/replicas/{number}/drain",
        headers={"Authorization": f"Bearer {key}"},
        trust_env=False,
    )


@pytest.mark.parametrize(
    ("keys", "key", "status", "text"),
    [
        ({}, "viewer", 404, "Not Found"),
        ({"api_keys": ("viewer",), "admin_keys": ("operator",)}, "viewer", 401, "API key"),
        ({"admin_keys": ("operator",)}, "operator", 400, "there is one replica"),
    ],
)
async def test_only_an_operator_with_a_key_may_drain(keys, key, status, text):
    with local_server(config=ServerConfig((MODEL,), **keys)) as server:
        answer = await asyncio.to_thread(_drain, server, 0, key)
        assert (answer.status_code, text in answer.text) == (status, True)
        assert server.engine.replicas()[0].state == "ready"


async def test_the_list_of_replicas_is_read_only():
    with local_server(FakeExecutor(sessions=2)) as server:
        async with socket_client(server.url) as client:
            await client.say(start_message(num_frames=None, unbounded=True))
            await client.chunk()
            listed = await asyncio.to_thread(_request, server.address, "GET")
            assert listed == (
                200,
                {
                    "object": "list",
                    "data": [
                        {
                            "number": 0, "state": "ready", "sessions": 1, "max_sessions": 2,
                            "failure": None,
                        }
                    ],
                    "waiting": 0,
                },
            )  # fmt: skip
            assert (await asyncio.to_thread(_request, server.address, "POST"))[0] == 405


def _request(address: str, method: str) -> tuple[int, dict]:
    answer = httpx.request(method, f"{address}/v1/replicas", trust_env=False)
    return answer.status_code, answer.json()
