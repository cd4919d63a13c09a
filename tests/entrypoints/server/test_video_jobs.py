"""Videos made while nobody waits: their life, their files, their pages, their end."""

import asyncio
import io
import logging
import threading

import av
import pytest

from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.http_server import NAME, running_server
from tests.helpers.videos import (
    BODY,
    FILES,
    FORM,
    SYNC,
    URL,
    job_that_is,
    stored_files,
    until,
)
from vllm_omni.entrypoints.server import video_form, video_jobs
from vllm_omni.entrypoints.server.http_errors import HttpRefusalError
from vllm_omni.entrypoints.server.video_rollout import prepare
from vllm_omni.entrypoints.server.video_store import VideoStore

pytest_plugins = ["tests.helpers.fixtures.videos"]
pytestmark = [
    pytest.mark.core_model,
    pytest.mark.omni,
    pytest.mark.cpu,
    pytest.mark.usefixtures("storage"),
    pytest.mark.timing,
]


def frames_of(mp4: bytes) -> list[av.VideoFrame]:
    with av.open(io.BytesIO(mp4)) as container:
        return list(container.decode(video=0))


async def test_life_of_a_job(server, executor, storage):
    executor.gate.clear()
    answer = await server.http.post(URL, data=FORM | {"quality": "high"}, files=FILES)
    assert answer.status_code == 200, answer.text
    job = answer.json()
    video = f"{URL}/{job['id']}"
    assert job["id"].startswith("video_gen_")
    assert (job["object"], job["status"], job["progress"]) == ("video", "queued", 0)
    assert (job["model"], job["size"], job["num_frames"], job["fps"]) == (NAME, "96x64", 21, 24)
    assert (job["quality"], job["seconds"]) == ("high", "1")
    assert job["prompt"] == FORM["prompt"]
    await job_that_is(server, job["id"], "in_progress")
    assert (await server.http.get(f"{video}/content")).status_code == 422
    executor.gate.set()
    done = await job_that_is(server, job["id"], "completed")
    assert done["progress"] == 100
    assert done["expires_at"] - done["completed_at"] == 24 * 3600
    assert done["error"] is None
    assert done["duration_s"] == 21 / 24
    assert done["peak_memory_mb"] == 4096 / 2**20
    assert done["media_type"] == "video/mp4"
    content = await server.http.get(f"{video}/content")
    assert content.headers["content-type"] == "video/mp4"
    assert len(frames_of(content.content)) == 21
    part = await server.http.get(f"{video}/content", headers={"range": "bytes=0-9"})
    assert (part.status_code, part.content) == (206, content.content[:10])
    assert [path.name for path in stored_files(storage)] == [done["file_name"]]
    assert (await server.http.delete(video)).json() == {
        "id": job["id"], "deleted": True, "object": "video.deleted",
    }  # fmt: skip
    assert stored_files(storage) == []
    for request in (server.http.get(video), server.http.delete(video)):
        assert (await request).status_code == 404
    assert (await server.http.get(f"{video}/content")).status_code == 404


async def test_the_log_knows_a_job_by_its_id(server, caplog):
    caplog.set_level(logging.INFO, logger="vllm_omni")
    job = (await server.http.post(URL, json=BODY)).json()
    await job_that_is(server, job["id"], "completed")
    await until(lambda: server.engine.num_sessions == 0)
    lines = [record.message for record in caplog.records if job["id"] in record.message]
    assert [word for line in lines for word in ("placed", "ended") if word in line] == [
        "placed", "ended",
    ]  # fmt: skip


async def test_sync_and_job_make_the_same_file(server):
    waited = await server.http.post(SYNC, json=BODY)
    job = (await server.http.post(URL, json=BODY)).json()
    await job_that_is(server, job["id"], "completed")
    # Bitwise: the same pictures by the same encoder.
    assert (await server.http.get(f"{URL}/{job['id']}/content")).content == waited.content


async def test_pages_of_jobs(server):
    ids = [(await server.http.post(URL, json=BODY)).json()["id"] for _ in range(4)]

    async def page(**query: object) -> tuple[list[str], bool]:
        answer = (await server.http.get(URL, params=query)).json()
        assert answer["object"] == "list"
        found = [job["id"] for job in answer["data"]]
        assert (answer["first_id"], answer["last_id"]) == (
            (found[0], found[-1]) if found else (None, None)
        )
        return found, answer["has_more"]

    assert await page() == (ids[::-1], False)
    assert await page(order="asc", limit=3) == (ids[:3], True)
    assert await page(order="asc", after=ids[2]) == (ids[3:], False)
    assert await page(after=ids[2], limit=1) == ([ids[1]], True)
    assert await page(limit=0) == ([], True)
    assert (await server.http.get(URL, params={"after": "video_gen_x"})).status_code == 404
    for wrong in ({"limit": 101}, {"limit": -1}, {"order": "up"}):
        assert (await server.http.get(URL, params=wrong)).status_code == 422


async def test_deleting_a_running_job_stops_it(server, executor):
    executor.gate.clear()
    job = (await server.http.post(URL, json=BODY | {"num_frames": 9 + 12 * 99})).json()
    await job_that_is(server, job["id"], "in_progress")
    first, second = await asyncio.gather(
        *(server.http.delete(f"{URL}/{job['id']}") for _ in range(2))
    )
    assert {first.status_code, second.status_code} <= {200, 404, 409}
    assert 200 in {first.status_code, second.status_code}
    executor.gate.set()
    await until(lambda: server.engine.num_sessions == 0)
    assert len(executor.plans) < 5
    assert (await server.http.get(URL)).json()["data"] == []


async def test_deleting_a_job_that_is_storing_its_file_leaves_no_file(server, storage, monkeypatch):
    began, go_on, ended = (threading.Event() for _ in range(3))
    put = VideoStore.put

    def slow_put(*arguments: object) -> object:
        began.set()
        assert go_on.wait(20)
        path = put(*arguments)
        ended.set()
        return path

    monkeypatch.setattr(VideoStore, "put", slow_put)
    job = (await server.http.post(URL, json=BODY)).json()
    await until(began.is_set)
    deleting = asyncio.create_task(server.http.delete(f"{URL}/{job['id']}"))
    await asyncio.sleep(0.1)
    go_on.set()
    assert (await deleting).json()["deleted"]
    await until(ended.is_set)
    assert stored_files(storage) == []
    assert (await server.http.get(URL)).json()["data"] == []


async def test_a_job_is_deleted_once(executor):
    executor.gate.clear()
    async with running_server(lambda: executor) as server:
        jobs = video_jobs.VideoJobs(server.state)
        start = video_form.start_of(BODY)
        job = await jobs.add(await prepare(server.state, start, "video_gen-1"), NAME)
        first, second = await asyncio.gather(
            jobs.delete(job.video_id), jobs.delete(job.video_id), return_exceptions=True
        )
        assert first is None
        assert isinstance(second, HttpRefusalError)
        assert second.status == 409
        executor.gate.set()


async def test_jobs_expire(server, storage, monkeypatch):
    monkeypatch.setattr(video_jobs, "RETENTION_S", 0.3)
    await server.http.post(URL, json=BODY)
    await until(lambda: len(stored_files(storage)) == 1)

    async def gone() -> bool:
        return (await server.http.get(URL)).json()["data"] == []

    await until(gone)
    assert stored_files(storage) == []


async def test_the_oldest_finished_job_makes_room(server, monkeypatch):
    monkeypatch.setattr(video_jobs, "MAX_JOBS", 2)
    ids = []
    for _ in range(3):
        ids.append((await server.http.post(URL, json=BODY)).json()["id"])
        await job_that_is(server, ids[-1], "completed")
    found = [job["id"] for job in (await server.http.get(URL)).json()["data"]]
    assert found == [ids[2], ids[1]]


async def test_a_refused_job_costs_no_finished_one(executor, storage, monkeypatch):
    monkeypatch.setattr(video_jobs, "MAX_JOBS", 2)
    async with running_server(lambda: executor, max_queued=0) as server:
        kept = (await server.http.post(URL, json=BODY)).json()["id"]
        await job_that_is(server, kept, "completed")
        executor.gate.clear()
        running = (await server.http.post(URL, json=BODY)).json()["id"]
        await job_that_is(server, running, "in_progress")
        answer = await server.http.post(URL, json=BODY)
        assert answer.json()["error"]["type"] == "server_full"
        found = [job["id"] for job in (await server.http.get(URL)).json()["data"]]
        assert found == [running, kept]
        assert [path.stem for path in stored_files(storage)] == [kept]
        executor.gate.set()


async def test_no_job_goes_while_all_are_running(executor, monkeypatch):
    monkeypatch.setattr(video_jobs, "MAX_JOBS", 1)
    executor.gate.clear()
    async with running_server(lambda: executor) as server:
        running = (await server.http.post(URL, json=BODY)).json()["id"]
        answer = await server.http.post(URL, json=BODY)
        assert answer.status_code == 503
        assert "1 videos are being made" in answer.json()["error"]["message"]
        assert server.engine.num_sessions == 1
        assert (await server.http.get(f"{URL}/{running}")).status_code == 200
        executor.gate.set()


async def test_the_oldest_files_make_room(server, storage, monkeypatch):
    ids = []
    for _ in range(4):
        ids.append((await server.http.post(URL, json=BODY)).json()["id"])
        await job_that_is(server, ids[-1], "completed")
        size = stored_files(storage)[0].stat().st_size
        # All files have the same size: there is room for two and a half.
        monkeypatch.setattr(video_jobs, "MAX_STORED_BYTES", size * 5 // 2)
    found = [job["id"] for job in (await server.http.get(URL)).json()["data"]]
    assert found == [ids[3], ids[2]]
    assert {path.stem for path in stored_files(storage)} == set(found)


async def test_a_file_that_never_fits_fails_its_job_alone(server, storage, monkeypatch):
    kept = (await server.http.post(URL, json=BODY)).json()
    await job_that_is(server, kept["id"], "completed")
    size = stored_files(storage)[0].stat().st_size
    monkeypatch.setattr(video_jobs, "MAX_STORED_BYTES", size - 1)
    job = (await server.http.post(URL, json=BODY)).json()
    failed = await job_that_is(server, job["id"], "failed")
    assert failed["error"]["code"] == "503"
    assert f"all files together may have {size - 1}" in failed["error"]["message"]
    assert [path.stem for path in stored_files(storage)] == [kept["id"]]


async def test_nothing_is_left_when_the_server_ends(storage):
    async with running_server(FakeExecutor) as server:
        job = (await server.http.post(URL, json=BODY)).json()
        await job_that_is(server, job["id"], "completed")
        folder = stored_files(storage)[0].parent
        assert folder.stat().st_mode & 0o077 == 0  # no other user can read or plant files
    assert list(storage.iterdir()) == []
