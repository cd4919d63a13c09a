"""One socket from start to end: order of messages, refused starts, ways to end, stalls."""

import asyncio

import pytest
from websockets.exceptions import ConnectionClosed

from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.local_server import MODEL, LocalServer, NoImages, local_server, wait_until
from tests.helpers.socket_client import (
    SocketClient,
    camera_event,
    picture_url,
    socket_client,
    start_message,
)
from tests.helpers.socket_fixtures import QUICK, server, unpainted_server
from vllm_omni.entrypoints.server.realtime_video import Timers
from vllm_omni.errors import DeviceOutOfMemoryError, WorkerFailedError

__all__ = ["server", "unpainted_server"]

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]

PINGED = Timers(stall=1.5, poll=0.05)
PINGS, PING_GAP_S = 10, 0.4
"""Together more than twice the stall limit."""


@pytest.fixture
def quick_server():
    with local_server(FakeExecutor(sessions=2), timers=QUICK) as running:
        yield running


async def wait_idle(server: LocalServer) -> None:
    await asyncio.to_thread(wait_until, server.idle)


async def keep_pinging(client: SocketClient) -> None:
    """Say nothing but pings for longer than the stall limit."""
    for _ in range(PINGS):
        await asyncio.sleep(PING_GAP_S)
        await client.say({"type": "session.ping"})
        await client.expect("session.pong")


class TestOrder:
    async def test_a_whole_session(self, server):
        async with socket_client(server.url) as client:
            await client.say(start_message())
            started = await client.expect("video.start")
            metadata = [(await client.chunk())[0] for _ in range(3)]
            done = await client.expect("session.done")
            assert await client.close_code() == 1000
        assert started["request_id"].startswith("video_stream-")
        assert {m["request_id"] for m in metadata} == {started["request_id"]}
        assert [m["generation_chunk_index"] for m in metadata] == [0, 1, 2]
        assert [m["transport_chunk_index"] for m in metadata] == [0, 1, 2]
        assert [m["num_frames"] for m in metadata] == [9, 12, 12]
        assert {m["kind"] for m in metadata} == {"media"}
        assert (done["chunks"], done["stopped"]) == (3, False)
        assert client.log == [
            "video.start", *["video.chunk_metadata", "binary"] * 3, "session.done",
        ]  # fmt: skip
        await wait_idle(server)

    async def test_video_start_echoes_the_request_and_says_what_can_be_done(self, server):
        message = start_message(model=MODEL)
        async with socket_client(server.url) as client:
            await client.say(message)
            started = await client.expect("video.start")
        config = started["config"]
        assert config["image_reference"] == {"image_url": picture_url()}
        assert (config["prompt"], config["num_outputs_per_prompt"]) == (message["prompt"], 1)
        assert None not in config.values()
        assert started["capabilities"] == {
            "height": 64, "width": 96, "frames_first_chunk": 9, "frames_per_chunk": 12,
            "native_fps": 16.0, "max_prompt_tokens": 512, "modalities": ["prompt", "camera"],
            "max_sessions": 2,
        }  # fmt: skip

    async def test_video_start_comes_before_the_picture_is_decoded(self, server):
        async with socket_client(server.url) as client:
            await client.say(
                start_message(image_reference={"image_url": "data:image/png;base64,AAAA"})
            )
            await client.expect("video.start")
            error = await client.expect("error")
            assert await client.close_code() == 1000
        assert "session.done" not in client.log
        assert error["request_id"].startswith("video_stream-")
        assert server.engine.num_sessions == 0

    async def test_ready_times_count_from_video_start(self, server):
        server.executor.chunk_s = 0.02
        async with socket_client(server.url) as client:
            await client.say(start_message())
            ready = [(await client.chunk())[0]["server_ready_ms"] for _ in range(3)]
        assert 0 < ready[0] < ready[1] < ready[2] < 20_000


class TestRefusedStart:
    @pytest.mark.parametrize(
        ("message", "words"),
        [
            ("no json", "not valid JSON"),
            ("[1]", "object"),
            (b"\x00", "binary frames are not part of this protocol"),
            ({"type": "session.ping"}, "must be session.start"),
            (start_message(format="mp4"), "format"),
            (start_message(prompt=None), "prompt: is required"),
            (start_message(width=0), "width"),
            (start_message(model="another"), "model: 'another' is not served"),
            ("x" * 4_194_305, "at most 4194304"),
        ],
        ids=lambda value: repr(value)[:20],
    )
    async def test_before_video_start(self, server, message, words):
        async with socket_client(server.url) as client:
            await client.say(message)
            assert words in (await client.expect("error"))["message"]
            assert await client.close_code() == 1000
        await wait_idle(server)
        assert server.executor.opened_total == 0

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"prompt": " "}, "prompt"),
            ({"image_reference": None}, "image_reference"),
            ({"num_frames": 10}, "num_frames"),
            ({"num_frames": None}, "num_frames"),
            ({"num_inference_steps": 8}, "num_inference_steps"),
            ({"width": 97}, "width"),
            ({"lora": {"name": "x"}}, "lora"),
            ({"extra_params": {"preencode_mp4": True}}, "preencode_mp4"),
            ({"extra_params": {"camera_action_script": [[["w"]]]}}, "camera_action_script"),
            ({"extra_params": {"action_path": "../secret"}}, "action_path"),
            ({"extra_params": {"volume": 1}}, "extra_params: unknown key 'volume'"),
            ({"extra_params": {"video_codec_options": {"crf": 0}}}, "video_codec_options.crf"),
            ({"flow_shift": -1}, "flow_shift: must be above 0"),
            ({"fps": 0.5}, "fps: must be at least 1"),
            ({"size": "8192x16"}, "width: must be at most 4096"),
            ({"size": "10x"}, "size: must be WIDTHxHEIGHT in pixels"),
            ({"image_reference": {"image_url": "ftp://a/b"}}, "data: or http(s) URL"),
            ({"prompt": "a\ud83d"}, "prompt: holds half of a surrogate pair"),
            ({"user": "\ud83d"}, "user: holds half of a surrogate pair"),
            ({"extra_params": {"\ud83d": 1}}, "extra_params: holds half of a surrogate pair"),
            ({"prompt": "x" * 40_000}, "prompt: must have at most 32768 characters"),
        ],
        ids=lambda value: ascii(value)[:30],
    )
    async def test_before_the_picture_is_fetched(self, changes, words):
        """It never comes, so nothing that was said can have come of it."""
        with local_server(images=NoImages()) as server:
            async with socket_client(server.url) as client:
                await client.say(start_message(**changes))
                error = await client.expect("error")
                assert await client.close_code() == 1000
            assert server.engine.num_sessions == 0
        assert words in error["message"]
        assert error["code"] == "invalid_request"
        assert "Traceback" not in error["message"]

    async def test_a_size_that_can_never_fit_is_told_before_the_picture_is_fetched(self):
        with local_server(images=NoImages()) as server:
            async with socket_client(server.url) as client:
                await client.say(start_message(width=256, height=256))
                error = await client.expect("error")
        assert error["code"] == "out_of_memory"
        assert "256x256 needs" in error["message"]

    async def test_a_picture_that_is_none_is_told_after_video_start(self, server):
        async with socket_client(server.url) as client:
            await client.say(start_message(image_reference={"image_url": "data:;base64,AAAA"}))
            await client.expect("video.start")
            error = await client.expect("error")
            assert await client.close_code() == 1000
        assert error["message"].startswith("image_reference: is damaged or of an unknown format")

    async def test_the_seed_is_told_also_where_it_was_drawn(self, server):
        for seed in (None, 7):
            async with socket_client(server.url) as client:
                await client.say(start_message(seed=seed, num_frames=9))
                told = (await client.expect("video.start"))["config"]["seed"]
                await client.rest()
            assert told == 7 if seed else 0 <= told < 2**53

    async def test_a_frame_above_the_socket_limit_closes_with_1009(self, server):
        async with socket_client(server.url) as client:
            try:
                await client.say("x" * (17 * 2**20))
                await client.hear()
            except ConnectionClosed as closed:
                assert closed.rcvd.code == 1009  # noqa: PT017
            else:
                pytest.fail("the socket stayed open")

    async def test_a_client_that_never_starts_is_told_and_closed(self):
        with local_server(timers=Timers(start=0.3)) as server:
            async with socket_client(server.url) as client:
                assert "no session.start" in (await client.expect("error"))["message"]
                assert await client.close_code() == 1000


class TestEnd:
    async def test_stop_ends_at_the_chunk_boundary(self, server):
        async with socket_client(server.url) as client:
            await client.say(start_message(num_frames=None, unbounded=True))
            await client.chunk()
            await client.say({"type": "session.stop"})
            done = await client.rest()
            assert await client.close_code() == 1000
        assert done["stopped"]
        assert done["chunks"] == client.log.count("binary")
        await wait_idle(server)

    async def test_stop_before_the_session_exists(self, unpainted_server):
        server = unpainted_server
        async with socket_client(server.url) as client:
            await client.say(start_message())
            await client.expect("video.start")
            await client.say(camera_event("early"))
            await client.say({"type": "session.stop"})
            assert (await client.expect("session.done"))["stopped"]
            assert await client.close_code() == 1000
        assert server.executor.opened_total == 0

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (DeviceOutOfMemoryError("chunk 1 ran out of device memory"), "out_of_memory"),
            (WorkerFailedError("rank 0 died"), "worker_restarted"),
        ],
    )
    async def test_a_failed_chunk_is_told_with_its_code(self, error, code):
        with local_server(FakeExecutor(), FakeExecutor()) as server:
            server.executor.failures[0, 1] = error
            async with socket_client(server.url) as client:
                await client.say(start_message())
                await client.expect("video.start")
                await client.chunk()
                assert (await client.expect("error"))["code"] == code
                assert await client.close_code() == 1000
            await wait_idle(server)
            async with socket_client(server.url) as client:
                await client.say(start_message())
                assert (await client.rest())["chunks"] == 3

    async def test_a_failure_after_stop_is_only_done(self, server):
        server.executor.failures[0, 1] = DeviceOutOfMemoryError("late")
        server.executor.chunk_s = 0.5
        async with socket_client(server.url) as client:
            await client.say(start_message())
            await client.chunk()
            await client.say({"type": "session.stop"})
            done = await client.rest()
        assert (done["chunks"], done["stopped"]) == (1, True)
        assert server.executor.failures == {}

    async def test_a_client_that_leaves_frees_its_session(self, server):
        for _ in range(5):
            async with socket_client(server.url) as client:
                await client.say(start_message(num_frames=None, unbounded=True))
                await client.chunk()
                await client.socket.close()
            await wait_idle(server)
        assert server.executor.opened_total == server.executor.closed_total == 5

    async def test_an_unexpected_error_is_told_without_its_text(self, server, monkeypatch):
        def broken(*_: object) -> bytes:
            raise ZeroDivisionError("secret detail")

        monkeypatch.setattr("vllm_omni.outputs.media.ChunkEncoder.encode", broken)
        async with socket_client(server.url) as client:
            await client.say(start_message())
            await client.expect("video.start")
            error = await client.expect("error")
            assert await client.close_code() == 1000
        assert "its log says why" in error["message"]
        assert "secret" not in error["message"]
        await wait_idle(server)
        monkeypatch.undo()
        async with socket_client(server.url) as client:
            await client.say(start_message())
            assert (await client.rest())["chunks"] == 3

    async def test_drain_tells_everybody(self, server):
        async with socket_client(server.url) as client, socket_client(server.url) as late:
            await client.say(start_message(num_frames=None, unbounded=True))
            await client.chunk()
            server.engine.drain()
            message = await client.error()
            assert "shutting down" in message["message"]
            assert await client.close_code() == 1000
            await late.say(start_message())
            await late.expect("video.start")
            assert "shutting down" in (await late.expect("error"))["message"]


class TestStall:
    async def test_no_progress_ends_the_session(self, quick_server):
        quick_server.executor.gate.clear()
        async with socket_client(quick_server.url) as client:
            await client.say(start_message())
            await client.expect("video.start")
            assert (await client.expect("error"))["message"].startswith("Stall timeout")
            done = await client.expect("session.done")
            assert (done["chunks"], done["stopped"]) == (0, True)
            assert await client.close_code() == 1000
        quick_server.executor.gate.set()
        await wait_idle(quick_server)

    async def test_a_ping_is_progress(self):
        with local_server(timers=PINGED) as server:
            server.executor.gate.clear()
            async with socket_client(server.url) as client:
                await client.say(start_message())
                await client.expect("video.start")
                await keep_pinging(client)
                server.executor.gate.set()
                assert (await client.rest())["chunks"] == 3

    async def test_waiting_in_line_is_progress(self):
        with local_server(timers=PINGED) as server:
            server.executor.gate.clear()
            async with socket_client(server.url) as running, socket_client(server.url) as waiting:
                await running.say(start_message(num_frames=None, unbounded=True))
                await running.expect("video.start")
                await asyncio.to_thread(wait_until, lambda: server.executor.open_ids)
                await waiting.say(start_message())
                await waiting.expect("video.start")
                await keep_pinging(running)
                server.executor.gate.set()
                await running.say({"type": "session.stop"})
                assert (await waiting.rest())["chunks"] == 3
