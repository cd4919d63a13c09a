"""One session of the live benchmark against a server that has a size and wants a key."""

import httpx
import pytest

from tests.helpers.local_server import MODEL, local_server
from tests.helpers.scripted_server import Peer, scripted_server
from vllm_omni.benchmarks import realtime as benchmark
from vllm_omni.benchmarks.realtime import parse_args
from vllm_omni.benchmarks.session import BenchmarkError, served_size
from vllm_omni.benchmarks.workload import load_workload
from vllm_omni.config.server import ServerConfig

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


@pytest.fixture(scope="module")
def keyed_server():
    with local_server(config=ServerConfig((MODEL,), api_keys=("key",))) as running:
        yield running


@pytest.mark.parametrize(
    ("flags", "size"),
    [("", (96, 64)), ("--width 128", (128, 480)), ("--height 128", (832, 128)),
     ("--width 128 --height 128", (128, 128))],
)  # fmt: skip
def test_the_size_is_the_servers_where_none_is_named(flags, size):
    made = benchmark._workload(parse_args(flags.split()), lambda: (96, 64))
    assert (made.width, made.height) == size


def test_a_server_without_a_size_gets_the_usual_one():
    made = benchmark._workload(parse_args([]), lambda: None)
    assert (made.width, made.height) == (832, 480)


def test_a_size_in_the_file_counts_as_named(tmp_path):
    path = tmp_path / "w.json"
    path.write_text('{"num_chunks": 2, "width": 128, "height": 128}')
    made = benchmark._workload(parse_args(["--workload", str(path)]), lambda: (96, 64))
    assert (made.width, made.height) == (128, 128)


@pytest.mark.parametrize("query", ["", "?a=ws"])
def test_the_size_of_a_server(keyed_server, query):
    assert served_size(f"{keyed_server.url}{query}", "key") == (96, 64)


def test_the_size_of_a_server_that_wants_another_key(keyed_server):
    with pytest.raises(BenchmarkError, match="give it as --api-key"):
        served_size(keyed_server.url, "wrong")


def told(width, height):
    return {
        "width": width, "height": height, "frames_first_chunk": 9, "frames_per_chunk": 12,
        "native_fps": 16.0, "max_prompt_tokens": 512, "modalities": ["camera"], "max_sessions": 1,
    }  # fmt: skip


def answers(monkeypatch, answer):
    async def get(*_: object, **__: object) -> httpx.Response:
        return answer

    monkeypatch.setattr(httpx.AsyncClient, "get", get)


@pytest.mark.parametrize(
    ("answer", "size"),
    [
        (httpx.Response(200, json=told(32, 16)), (32, 16)),
        (httpx.Response(200, json=told(None, None)), None),
        (httpx.Response(404, text="Not Found"), None),
    ],
)
def test_answers_about_a_size(monkeypatch, answer, size):
    answers(monkeypatch, answer)
    assert served_size("wss://h/proxy/v1/realtime/video") == size


@pytest.mark.parametrize("text", ["<html>", "[]", "{}", '{"width": "wide", "height": 1}'])
def test_answers_that_describe_no_server(monkeypatch, text):
    answers(monkeypatch, httpx.Response(200, text=text))
    with pytest.raises(BenchmarkError, match="does not describe a server"):
        served_size("ws://h/v1/realtime/video")


def test_a_server_that_does_not_answer_has_no_size():
    assert served_size("ws://127.0.0.1:1/v1/realtime/video") is None


@pytest.mark.parametrize("key", ["key", None])
def test_a_run_with_a_key_and_without_a_size(keyed_server, capsys, key):
    flags = ["--base-url", keyed_server.address, "--num-chunks", "2"]
    status = benchmark.main([*flags, *(["--api-key", key] if key else [])])
    out = capsys.readouterr()
    if key is None:
        assert status == 1
        assert "ERROR: " in out.err
        assert "--api-key" in out.err
        return
    assert status == 0
    assert "Rollout: 2 chunks, 21 frames, 96x64" in out.out


async def test_only_the_video_that_is_saved_is_kept():
    async def script(peer: Peer):
        await peer.video_start()
        for index in range(2):
            await peer.chunk(index, payload=b"%d" % index)
        await peer.done()

    workload = load_workload(None, {"num_chunks": 2, "image": "https://host/a.png"})
    async with scripted_server(script) as server:
        for saving, last in (([], b""), (["--save-video", "v.mp4"], b"01")):
            args = parse_args(["--sessions", "3", *saving])
            results = await benchmark._measure(args, server.url, workload)
            assert [result.video for result in results] == [b"", b"", last]
