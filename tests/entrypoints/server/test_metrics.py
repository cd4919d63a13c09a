"""What a scrape of ``/metrics`` shows after known work: names, labels and counts."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.http_server import running_server
from tests.helpers.videos import BODY, SYNC, until
from vllm_omni.errors import SessionFailedError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]

COUNTED = {
    "num_requests_running": 0, "num_requests_waiting": 0, "max_sessions": 1,
    "quarantined_failures": 0,
    "kv_pool_bytes": 4 * 1024, "kv_used_bytes": 0, "chunks_total": 2 * 2 + 1,
    "worker_restarts_total": 0, "deadline_misses_total": 0,
    "request_queue_wait_s_count": 3, "e2e_request_latency_s_count": 3, "ttfc_s_count": 3,
    "chunk_interval_s_count": 0, "diffusion_exec_s_count": 5, "diffusion_preprocess_s_count": 5,
    "diffusion_forward_s_count": 5, "vae_decode_s_count": 5, "denoise_step_latency_s_count": 5,
    "requests_success_total finished": 2, "requests_failed_total stage_error": 1,
    "requests_success_total stopped": 0, "requests_failed_total client_abort": 0,
    "requests_failed_total client_disconnect": 0, "requests_failed_total unknown": 0,
    "requests_refused_total invalid_request": 1, "requests_refused_total server_full": 0,
    "peak_memory_mb 0": 4096 / 2**20,
}  # fmt: skip
"""Two rollouts of two chunks, one that failed in its second, and one that was refused. Nobody
watches them as they come: there is no interval and no deadline."""


async def scrape(server) -> dict[str, float]:
    text = (await server.http.get("/metrics")).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "world"
            name = " ".join([sample.name.removeprefix("vllm_omni:"), *sample.labels.values()])
            found[name] = sample.value
    return found


async def test_a_scrape_counts_the_work():
    executor = FakeExecutor()
    executor.failures = {(2, 1): SessionFailedError("a chunk raised")}
    async with running_server(lambda: executor) as server:
        statuses = [(await server.http.post(SYNC, json=BODY)).status_code for _ in range(3)]
        assert statuses == [200, 200, 500]
        assert (await server.http.post(SYNC, json=BODY | {"num_frames": 10})).status_code == 400
        await until(lambda: executor.open_ids == [] and server.engine.num_sessions == 0)
        found = await scrape(server)
        assert {name: found.get(name) for name in COUNTED} == COUNTED
        # The fake's parts of a chunk: 1 ms of probes and 0.5 ms of commit.
        assert found["denoise_step_latency_s_sum"] == pytest.approx(5 * 0.001 / 4)
        assert found["diffusion_forward_s_sum"] == pytest.approx(5 * 0.0015)
        assert found["diffusion_exec_s_sum"] == pytest.approx(5 * 0.0015)

        async def lag_was_measured() -> bool:
            return (await scrape(server))["event_loop_lag_s_count"] >= 2

        await until(lag_was_measured)


async def test_a_client_that_leaves_its_video_is_counted_once():
    executor = FakeExecutor()
    executor.gate.clear()
    async with running_server(lambda: executor) as server:
        leaving = asyncio.create_task(server.http.post(SYNC, json=BODY))
        await until(lambda: len(executor.open_ids) == 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)

        async def counted() -> bool:
            return (await scrape(server))["requests_failed_total client_disconnect"] > 0

        await until(counted)
        executor.gate.set()
        await until(lambda: server.engine.num_sessions == 0)
        found = await scrape(server)
    ends = {name: count for name, count in found.items() if "requests_" in name and count > 0}
    assert {name: count for name, count in ends.items() if "_total" in name} == {
        "requests_failed_total client_disconnect": 1
    }


async def test_gauges_show_who_runs_and_who_waits():
    executor = FakeExecutor()
    executor.gate.clear()
    async with running_server(lambda: executor) as server:
        ids = [(await server.http.post("/v1/videos", json=BODY)).json()["id"] for _ in range(2)]
        await until(lambda: len(executor.open_ids) == 1)

        async def both_seen() -> bool:
            found = await scrape(server)
            return (found["num_requests_running"], found["num_requests_waiting"]) == (1, 1)

        await until(both_seen)
        assert (await scrape(server))["kv_used_bytes"] == 2 * 1024
        for video_id in ids:
            await server.http.delete(f"/v1/videos/{video_id}")
        executor.gate.set()
        await until(lambda: server.engine.num_sessions == 0)
        found = await scrape(server)
        assert (found["num_requests_running"], found["kv_used_bytes"]) == (0, 0)
