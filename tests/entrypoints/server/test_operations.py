"""Routes for operators: readiness, liveness, names, figures."""

import asyncio
import re
import threading
from dataclasses import replace

import httpx
import pytest

from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.local_server import MODEL, local_server, wait_until
from tests.helpers.socket_client import socket_client, start_message
from vllm_omni import __version__
from vllm_omni.config.server import ServerConfig
from vllm_omni.diffusion.messages import GroupCapacity
from vllm_omni.errors import CheckpointError, WorkerFailedError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


def test_health_while_loading_ready_and_draining():
    with local_server(start_engine=False) as server:
        loading = httpx.get(f"{server.address}/health")
        assert (loading.status_code, loading.json()["reason"]) == (503, "loading")
        assert httpx.get(f"{server.address}/ping").status_code == 200
        server.engine.start()
        ready = httpx.get(f"{server.address}/health")
        assert (ready.status_code, ready.json()) == (
            200,
            {"status": "healthy", "quarantined_failures": 0},
        )
        server.engine.drain()
        draining = httpx.get(f"{server.address}/health")
        assert (draining.status_code, draining.json()["reason"]) == (503, "draining")
        refused = httpx.post(f"{server.address}/v1/videos", json={})
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "no video can be made now: draining"
        assert httpx.post(f"{server.address}/ping").status_code == 200


class Loading(FakeExecutor):
    """Loads until it may be ready; its process keeps the memory of one failure."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def start(self) -> GroupCapacity:
        assert self.go_on.wait(20), "nobody let it go on"
        return replace(super().start(), quarantined=1)


async def test_health_while_workers_are_restarted():
    with local_server(FakeExecutor(), loading := Loading()) as server:
        server.executor.failures[0, 0] = WorkerFailedError("rank 0 died")
        async with socket_client(server.url) as client:
            await client.say(start_message())
            assert (await client.error())["code"] == "worker_restarted"
        health = httpx.get(f"{server.address}/health")
        assert (health.status_code, health.json()["reason"]) == (503, "restarting")
        video = httpx.post(f"{server.address}/v1/videos", json={})
        assert video.json()["error"]["message"].endswith("now: restarting")
        loading.go_on.set()
        await asyncio.to_thread(wait_until, lambda: server.engine.unready_reason is None)
        health = httpx.get(f"{server.address}/health")
        assert (health.status_code, health.json()["quarantined_failures"]) == (200, 1)
        metrics = httpx.get(f"{server.address}/metrics").text
        assert re.search(r"vllm_omni:quarantined_failures\{[^}]*\} 1\.0", metrics)


async def test_who_waits_while_the_engine_loads_is_told_that_it_failed():
    class Broken(FakeExecutor):
        def start(self) -> GroupCapacity:
            raise CheckpointError("a tensor is missing")

    with local_server(Broken(), start_engine=False) as server:
        async with socket_client(server.url) as client:
            await client.say(start_message(queue=True))
            await client.expect("session.queued")
            with pytest.raises(CheckpointError):
                await asyncio.to_thread(server.engine.start)
            error = await client.expect("error")
            assert "a tensor is missing" in error["message"]
            assert "code" not in error
            assert await client.close_code() == 1000
        health = httpx.get(f"{server.address}/health").json()
        assert health == {
            "status": "unhealthy",
            "reason": "a tensor is missing",
            "quarantined_failures": 0,
        }


async def test_health_of_an_engine_that_gave_up():
    with local_server(*(FakeExecutor() for _ in range(6))) as server:
        for executor in server.executors:
            executor.failures[0, 0] = WorkerFailedError("rank 0 died")
        for _ in range(6):
            async with socket_client(server.url) as client:
                await client.say(start_message())
                assert (await client.error())["code"] == "worker_restarted"
        await asyncio.to_thread(wait_until, lambda: server.engine.failure is not None)
        health = httpx.get(f"{server.address}/health")
        assert health.status_code == 503
        assert health.json()["status"] == "unhealthy"
        assert "giving up" in health.json()["reason"]


async def test_sessions_may_start_while_the_engine_loads():
    with local_server(start_engine=False) as server:
        async with socket_client(server.url) as client:
            await client.say(start_message(queue=True))
            assert (await client.expect("session.queued"))["position"] == 1
            await asyncio.to_thread(server.engine.start)
            assert (await client.rest())["chunks"] == 3


def test_models():
    config = ServerConfig((MODEL, "alias"))
    with local_server(config=config) as server:
        answer = httpx.get(f"{server.address}/v1/models").json()
    assert answer["object"] == "list"
    assert [entry["id"] for entry in answer["data"]] == [MODEL, "alias"]
    entry = answer["data"][0]
    assert (entry["object"], entry["owned_by"]) == ("model", "vllm")
    assert (entry["parent"], entry["max_model_len"]) == (None, None)
    assert isinstance(entry["created"], int)
    assert entry["permission"][0]["object"] == "model_permission"


async def test_figures():
    with local_server() as server:
        base = server.address
        assert httpx.get(f"{base}/version").json() == {"version": __version__}
        capabilities = httpx.get(f"{base}/v1/realtime/capabilities").json()
        async with socket_client(server.url) as client:
            await client.say(start_message())
            assert (await client.expect("video.start"))["capabilities"] == capabilities
            await client.rest()
        await asyncio.to_thread(wait_until, server.idle)
        assert httpx.get(f"{base}/load").json() == {"server_load": 0}
        text = httpx.get(f"{base}/metrics").text
    label = f'{{model_name="{MODEL}"}}'
    assert f"vllm_omni:chunks_total{label} 3.0" in text
    assert f"vllm_omni:num_requests_running{label} 0.0" in text
    for name in ("ttfc_s", "chunk_interval_s", "event_loop_lag_s", "kv_pool_bytes",
                 "deadline_misses_total", "e2e_request_latency_s"):  # fmt: skip
        assert f"vllm_omni:{name}" in text


def test_documentation():
    with local_server() as server:
        assert httpx.get(f"{server.address}/docs").status_code == 200
        paths = httpx.get(f"{server.address}/openapi.json").json()["paths"]
    assert {"/health", "/v1/models", "/v1/realtime/capabilities"} <= set(paths)
