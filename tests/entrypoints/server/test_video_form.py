"""What is no request for a video is refused at once, and says why."""

import asyncio

import pytest

from tests.helpers.http_server import NAME, running_server
from tests.helpers.videos import (
    BODY,
    DATA_URL,
    FILES,
    FORM,
    SYNC,
    URL,
    until,
)
from vllm_omni.config.server import ServerConfig
from vllm_omni.entrypoints.server import video_form

pytest_plugins = ["tests.helpers.fixtures.videos"]
pytestmark = [
    pytest.mark.core_model,
    pytest.mark.omni,
    pytest.mark.cpu,
    pytest.mark.usefixtures("storage"),
    pytest.mark.timing,
]

STILL = [[[], [], []]]


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        ({"extra_params": "{"}, 400, "extra_params: is not valid JSON"),
        ({"model": "other"}, 400, "'other' is not served here"),
        ({"image_reference": {"file_id": "f"}}, 400, "file_id"),
        ({"image_reference": None}, 400, "first picture"),
        ({"input_reference": DATA_URL}, 400, "give one of"),
        ({"video_reference": "v"}, 400, "video_reference"),
        ({"control_type": "depth"}, 400, "control_type: is not supported"),
        ({"unbounded": True}, 400, "/v1/realtime/video"),
        ({"num_frames": 20}, 400, "9 + 12k"),
        ({"prompt": "  "}, 400, "blank"),
        ({"num_inference_steps": 5}, 400, "must be 4"),
        ({"num_outputs_per_prompt": 2}, 400, "must be 1"),
        ({"lora": {"name": "x"}}, 400, "adapters"),
        ({"size": "8000x16"}, 400, "at most 4096"),
        ({"image_reference": {"image_url": "data:;base64,AAAA"}}, 400, "format"),
        ({"image_reference": {"image_url": "ftp://a/b"}}, 400, "http(s)"),
        ({"extra_params": {"camera_action_script": STILL}}, 400, "camera_action_script"),
        ({"extra_params": {"action_path": "x"}}, 400, "action_path"),
        ({"extra_params": {"video_codec_options": {"x264opts": "a"}}}, 400, "x264opts"),
        ({"prompt": None}, 422, "prompt: is required"),
        ({"seconds": "0"}, 422, "seconds"),
        ({"fps": 0}, 422, "fps"),
        ({"seed": "x"}, 422, "seed"),
        ({"num_outputs_per_prompt": 11}, 422, "num_outputs_per_prompt"),
        ({"guidance_scale": 21}, 422, "guidance_scale"),
    ],
)
@pytest.mark.parametrize("url", [URL, SYNC])
async def test_refusals_come_at_once(server, executor, url, change, status, text):
    answer = await server.http.post(url, json=BODY | change)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)
    assert text in answer.json()["error"]["message"]
    assert executor.opened_total == 0
    assert (await server.http.get(URL)).json()["data"] == []


async def test_bodies_that_cannot_be_read(server, monkeypatch):
    post = server.http.post
    assert (await post(SYNC, content=b"x")).status_code == 415
    as_json = {"content-type": "application/json"}
    assert (await post(SYNC, content=b"{", headers=as_json)).status_code == 400
    assert (await post(SYNC, content=b"[]", headers=as_json)).status_code == 400
    assert (await post(SYNC, content=b"\xff", headers=as_json)).status_code == 400
    as_form = {"content-type": "multipart/form-data; boundary=b"}
    assert (await post(SYNC, content=b"--c\r\n", headers=as_form)).status_code == 400
    as_pairs = {"content-type": "application/x-www-form-urlencoded"}
    for separator in (b"&", b";"):
        many = await post(SYNC, content=separator * 2**20, headers=as_pairs)
        assert many.status_code == 400
        assert "more than 100 fields" in many.json()["error"]["message"]
    lists = await post(SYNC, content=b'{"x":[' + b"[]," * 2**20 + b"[]]}", headers=as_json)
    assert lists.status_code == 400
    assert "100000 values" in lists.json()["error"]["message"]
    monkeypatch.setattr(video_form, "MAX_BODY_BYTES", 1000)
    assert (await post(SYNC, json=BODY)).status_code == 413
    assert (await post(SYNC, data=FORM, files=FILES)).status_code == 413
    assert (await server.http.get("/ping")).status_code == 200


async def test_a_slow_body_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr(video_form, "BODY_TIMEOUT_S", 0.2)

    async def slowly():
        yield b"{"
        await asyncio.sleep(1)
        yield b"}"

    answer = await server.http.post(
        SYNC, content=slowly(), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 408


async def test_a_loading_server_says_so(executor):
    async with running_server(lambda: executor, start_engine=False) as server:
        for url in (URL, SYNC):
            answer = await server.http.post(url, json=BODY)
            assert answer.status_code == 503
            assert "loading" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"] == "5"


async def test_a_full_server_says_so(executor):
    executor.gate.clear()
    async with running_server(lambda: executor, max_queued=1) as server:
        for _ in range(2):
            assert (await server.http.post(URL, json=BODY)).status_code == 200
            await until(lambda: len(executor.open_ids) == 1)
        answer = await server.http.post(URL, json=BODY)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_full")
        assert len((await server.http.get(URL)).json()["data"]) == 2
        executor.gate.set()


async def test_limits_of_the_operator_hold(executor):
    config = ServerConfig((NAME,), max_pixels=96 * 64 - 1, api_keys=("key",))
    async with running_server(lambda: executor, config=config) as server:
        assert (await server.http.post(SYNC, json=BODY)).status_code == 401
        key = {"authorization": "Bearer key"}
        answer = await server.http.post(SYNC, json=BODY, headers=key)
        assert answer.status_code == 400
        assert "--max-generated-image-size" in answer.json()["error"]["message"]


async def test_other_pages_cannot_start_or_delete_videos(server):
    page = {"origin": "https://elsewhere.example"}
    assert (await server.http.post(SYNC, json=BODY, headers=page)).status_code == 403
    assert (await server.http.delete(f"{URL}/x", headers=page)).status_code == 403
    own = {"origin": str(server.http.base_url).rstrip("/")}
    assert (await server.http.post(SYNC, json=BODY, headers=own)).status_code == 200
