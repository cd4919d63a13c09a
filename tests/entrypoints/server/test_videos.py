"""Videos that a client waits for, on real sockets: a fake executor, and the model itself."""

import asyncio
import io
import json
import re
import threading
from dataclasses import replace

import av
import numpy as np
import pytest
from PIL import Image

from tests.helpers.http_server import NAME, Running, running_server, tiny_deployment
from tests.helpers.local_server import NoImages
from tests.helpers.outcomes import outcomes
from tests.helpers.socket_client import socket_client
from tests.helpers.videos import (
    BODY,
    DATA_URL,
    FILES,
    FORM,
    PICTURE,
    SYNC,
    URL,
    until,
)
from vllm_omni.diffusion.executor import create_executor
from vllm_omni.diffusion.messages import ChunkPlan, LiveCamera, OutputKind, ScriptedKeys
from vllm_omni.diffusion.utils.media_utils import finalize_streaming_video_bytes
from vllm_omni.entrypoints.server import state as server_state
from vllm_omni.entrypoints.server.image_source import ImageSource
from vllm_omni.errors import DeviceOutOfMemoryError, SessionFailedError
from vllm_omni.inputs.picture import load_image
from vllm_omni.outputs.media import ChunkEncoder

pytest_plugins = ["tests.helpers.fixtures.videos"]
pytestmark = [
    pytest.mark.core_model,
    pytest.mark.omni,
    pytest.mark.cpu,
    pytest.mark.usefixtures("storage"),
    pytest.mark.timing,
]

STILL = [[[], [], []]]


def counted(server: Running) -> dict[str, float]:
    return outcomes(server.engine.metrics, NAME)


def frames_of(mp4: bytes) -> list[av.VideoFrame]:
    with av.open(io.BytesIO(mp4)) as container:
        return list(container.decode(video=0))


async def test_form_with_upload_gives_one_finished_mp4(server, executor):
    answer = await server.http.post(SYNC, data=FORM, files=FILES)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "video/mp4"
    assert answer.headers["x-request-id"].startswith("video_sync-")
    assert answer.headers["x-model"] == NAME
    assert answer.headers["x-seed"] == "3"
    assert float(answer.headers["x-inference-time-s"]) >= 0
    assert set(json.loads(answer.headers["x-stage-durations"])) == {
        "condition", "camera", "probes", "decode",
    }  # fmt: skip
    assert float(answer.headers["x-peak-memory-mb"]) == pytest.approx(4096 / 2**20, abs=1e-3)
    frames = frames_of(answer.content)
    assert [float(frame.pts * frame.time_base) for frame in frames] == pytest.approx(
        [index / 24 for index in range(21)], abs=1e-3
    )
    assert (frames[0].width, frames[0].height) == (96, 64)
    (request,) = executor.requests.values()
    assert (request.seed, request.num_chunks, request.fps) == (3, 2, 24.0)
    assert request.camera == LiveCamera()
    np.testing.assert_array_equal(request.image.rgb, Image.open(io.BytesIO(PICTURE)))
    await until(lambda: executor.open_ids == [])


async def test_json_form_and_urlencoded_bodies_mean_the_same(server, executor):
    form = FORM | {"fps": "16", "image_reference": json.dumps(BODY["image_reference"])}
    as_json = await server.http.post(SYNC, json=BODY)
    as_form = await server.http.post(SYNC, data=form, files={"empty": ("", b"")})
    as_text = await server.http.post(SYNC, data=form)
    uploaded = await server.http.post(SYNC, data=FORM | {"fps": "16"}, files=FILES)
    by_url = await server.http.post(
        SYNC, json=BODY | {"image_reference": None, "input_reference": DATA_URL}
    )
    answers = [as_json, as_form, as_text, uploaded, by_url]
    assert [answer.status_code for answer in answers] == [200] * 5
    # Bitwise: the same pictures by the same encoder.
    assert len({answer.content for answer in answers}) == 1
    requests = list(executor.requests.values())
    for request in requests[1:]:
        np.testing.assert_array_equal(request.image.rgb, requests[0].image.rgb)
        assert (request.seed, request.fps) == (requests[0].seed, requests[0].fps)


async def test_scripts_come_through_extra_params(server, executor):
    script = [[["w"], ["w"], ["w"]], [["l"], [], []]]
    form = FORM | {"extra_params": json.dumps({"camera_action_script": script})}
    assert (await server.http.post(SYNC, data=form, files=FILES)).status_code == 200
    (request,) = executor.requests.values()
    assert isinstance(request.camera, ScriptedKeys)
    assert [[set(keys) for keys in chunk] for chunk in request.camera.chunks] == [
        [{"w"}, {"w"}, {"w"}], [{"l"}, set(), set()],
    ]  # fmt: skip


async def test_a_deployment_without_streaming_serves_videos_and_sockets(executor):
    """Pictures are 8-bit for both, although a Python client would get floats there."""
    collecting = replace(tiny_deployment(), streaming_output=False, step_execution=False)
    script = {"camera_action_script": STILL * 2}
    async with running_server(lambda: executor, deployment=collecting) as server:
        assert (await server.http.post(SYNC, json=BODY)).status_code == 400  # no live camera
        answer = await server.http.post(SYNC, json=BODY | {"extra_params": script})
        assert answer.status_code == 200, answer.text
        url = str(server.http.base_url).replace("http", "ws", 1).rstrip("/")
        async with socket_client(f"{url}/v1/realtime/video") as client:
            await client.say({"type": "session.start", **BODY, "extra_params": script})
            await client.expect("video.start")
            assert [(await client.chunk())[0]["num_frames"] for _ in range(2)] == [9, 12]
    assert {request.output for request in executor.requests.values()} == {OutputKind.UINT8}


async def test_a_leaving_client_ends_its_session(server, executor):
    executor.gate.clear()
    sending = asyncio.create_task(server.http.post(SYNC, json=BODY | {"num_frames": 9 + 12 * 99}))
    await until(lambda: len(executor.open_ids) == 1)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    failed = 'requests_failed_total{model_name="world",reason="client_disconnect"} 1.0'

    async def counted() -> bool:
        return failed in (await server.http.get("/metrics")).text

    await until(counted)
    executor.gate.set()
    await until(lambda: executor.open_ids == [] and server.engine.num_sessions == 0)
    assert len(executor.plans) < 5


@pytest.mark.parametrize("is_open", [True, False])
async def test_time_runs_out(server, executor, monkeypatch, is_open):
    """Before its session is open or after, it is a video that nobody waits for any more."""
    if not is_open:
        monkeypatch.setattr(ImageSource, "load", NoImages.load)
    monkeypatch.setenv("VLLM_OMNI_VIDEO_SYNC_TIMEOUT", "1")
    executor.gate.clear()
    answer = await server.http.post(SYNC, json=BODY)
    assert answer.status_code == 504
    assert "VLLM_OMNI_VIDEO_SYNC_TIMEOUT" in answer.json()["error"]["message"]
    executor.gate.set()
    await until(lambda: executor.open_ids == [] and server.engine.num_sessions == 0)
    assert bool(executor.opened_total) is is_open
    assert counted(server) == {"failed client_disconnect": 1}


@pytest.mark.parametrize("url", [SYNC, URL])
async def test_a_client_that_leaves_while_it_sends_is_no_bad_request(server, url):
    async def never_whole():
        yield b'{"prompt": '
        await asyncio.Event().wait()

    headers = {"content-type": "application/json"}
    sending = asyncio.create_task(server.http.post(url, content=never_whole(), headers=headers))
    await asyncio.sleep(0.3)
    assert counted(server) == {}
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await until(lambda: counted(server) == {"failed client_disconnect": 1})


@pytest.mark.parametrize("url", [SYNC, URL])
async def test_what_breaks_before_a_session_is_told_counted_and_logged(
    server, monkeypatch, caplog, url
):
    async def broken(*_: object) -> bytes:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(ImageSource, "load", broken)
    answer = await server.http.post(url, json=BODY)
    assert answer.status_code == 500
    assert answer.json() == {
        "error": {
            "message": "Video generation failed: an internal error; see the server's log",
            "type": "server_error",
            "param": None,
            "code": 500,
            "request_id": answer.headers["X-Request-Id"],
        }
    }
    assert counted(server) == {"failed unknown": 1}
    assert re.search(r"video_(sync-|gen_)\w+ broke before it was a session", caplog.text)
    await until(lambda: "ZeroDivisionError: a secret" in caplog.text)


@pytest.mark.parametrize(
    ("error", "status"),
    [(SessionFailedError("a chunk raised"), 500), (DeviceOutOfMemoryError("no memory"), 503)],
)
async def test_a_failing_chunk_fails_its_video_only(server, executor, error, status):
    executor.failures = {(0, 1): error, (1, 1): error}
    answer = await server.http.post(SYNC, json=BODY)
    assert answer.status_code == status
    prefix = "Video generation failed: " if status == 500 else ""
    assert answer.json()["error"]["message"] == f"{prefix}{error}"
    made = (await server.http.post(URL, json=BODY)).json()

    async def failed() -> bool:
        return (await server.http.get(f"{URL}/{made['id']}")).status_code == status

    await until(failed)
    job = (await server.http.get(f"{URL}/{made['id']}")).json()
    assert job["status"] == "failed"
    assert job["error"] == {"code": str(status), "message": f"{prefix}{error}"}
    content = await server.http.get(f"{URL}/{made['id']}/content")
    assert (content.status_code, str(error) in content.text) == (422, True)
    assert (await server.http.post(SYNC, json=BODY)).status_code == 200


@pytest.mark.parametrize("fails", [False, True])
async def test_encoders_are_made_off_the_event_loop_and_always_closed(
    server, executor, monkeypatch, fails
):
    made: list[tuple[str, ChunkEncoder]] = []

    class Watched(ChunkEncoder):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            made.append((threading.current_thread().name, self))

    monkeypatch.setattr(server_state, "ChunkEncoder", Watched)
    if fails:
        executor.failures = {(0, 1): SessionFailedError("a chunk raised")}
    answer = await server.http.post(SYNC, json=BODY)
    assert answer.status_code == (500 if fails else 200)
    ((thread, encoder),) = made
    assert thread.startswith("media")
    assert encoder._closed


async def test_an_unforeseen_error_fails_the_video_and_keeps_its_secret(server, monkeypatch):
    def break_down(*_: object) -> bytes:
        raise RuntimeError("a secret")

    monkeypatch.setattr(ChunkEncoder, "encode", break_down)
    # Long enough to be open still when its first chunk breaks: two may wait for the encoder.
    body = BODY | {"num_frames": 9 + 12 * 9}
    answer = await server.http.post(SYNC, json=body)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"].startswith("Video generation failed: an internal")
    made = (await server.http.post(URL, json=body)).json()

    async def failed() -> bool:
        return (await server.http.get(f"{URL}/{made['id']}")).status_code == 500

    await until(failed)
    assert "secret" not in (await server.http.get(f"{URL}/{made['id']}")).text
    await until(lambda: server.engine.num_sessions == 0)
    figures = (await server.http.get("/metrics")).text
    for reason, count in (("unknown", 2), ("client_disconnect", 0)):
        labels = f'{{model_name="{NAME}",reason="{reason}"}}'
        assert f"requests_failed_total{labels} {count:.1f}\n" in figures


async def test_a_server_that_ends_fails_running_videos(server, executor):
    executor.gate.clear()
    sending = asyncio.create_task(server.http.post(SYNC, json=BODY))
    await until(lambda: len(executor.open_ids) == 1)
    server.engine.drain()
    executor.gate.set()
    answer = await sending
    assert answer.status_code == 503
    assert (await server.http.post(URL, json=BODY)).status_code == 503


async def test_the_video_is_the_rollout_of_the_workers():
    """Bitwise: the tiny checkpoint's chunks, made directly, through the same encoder."""
    deployment = tiny_deployment()
    executor = create_executor(deployment.config)
    async with running_server(lambda: executor, deployment=deployment) as server:
        answer = await server.http.post(SYNC, json=BODY)
        assert answer.status_code == 200, answer.text
        door = server.state.door
        request = door.complete(door.check(VIDEO | {"prompt": BODY["prompt"]}), load_image(PICTURE))
        chunks: list[np.ndarray] = []
        executor.open_session("alone", request)
        for index in range(2):
            still = np.broadcast_to(np.eye(4), (3, 4, 4)).copy()
            plan = ChunkPlan("alone", index, poses=still)
            executor.run_chunk(plan, lambda result: chunks.append(result.data.copy()))
        executor.close_session("alone")
    encoder = ChunkEncoder(96, 64, 16)
    fragments = b"".join([*(encoder.encode(chunk) for chunk in chunks), encoder.finish()])
    assert answer.content == finalize_streaming_video_bytes(fragments)
    assert sum(len(chunk) for chunk in chunks) == len(frames_of(answer.content)) == 21
    assert float(answer.headers["x-peak-memory-mb"]) > 1


VIDEO = {"height": 64, "width": 96, "num_frames": 21, "seed": 3, "fps": 16, "output_type": "pil",
         "image": PICTURE}  # fmt: skip
