"""The video stream as clients of the public server know it."""

import pytest

from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.local_server import local_server
from tests.helpers.socket_client import camera_event, socket_client, start_message
from vllm_omni.diffusion.messages import EncoderOptions
from vllm_omni.engine.interactions import InteractionBox
from vllm_omni.entrypoints.server.realtime_video import Timers
from vllm_omni.errors import DeviceOutOfMemoryError, InteractionError
from vllm_omni.outputs.media import ChunkEncoder

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

ENDLESS = start_message(num_frames=None, unbounded=True)


@pytest.fixture
def server():
    with local_server(FakeExecutor(), timers=Timers(stall=1.5, poll=0.05)) as running:
        yield running


async def refusal(server, message: dict) -> str:
    """Text of the error that ends a session which never starts to stream."""
    async with socket_client(server.url) as client:
        await client.say(message)
        error = await client.error()
        assert await client.close_code() == 1000
        assert "binary" not in client.log
        return error["message"]


async def answer_to(server, message: dict) -> dict:
    """What a running session answers to a message beside its video."""
    async with socket_client(server.url) as client:
        await client.say(ENDLESS)
        await client.chunk()
        await client.say(message)
        while True:
            heard = await client.hear()
            if isinstance(heard, dict) and heard["type"] != "video.chunk_metadata":
                return heard


class TestStart:
    async def test_quality_is_checked_and_echoed(self, server):
        async with socket_client(server.url) as client:
            await client.say(start_message(quality="high"))
            assert (await client.expect("video.start"))["config"]["quality"] == "high"
        assert "quality" in await refusal(server, start_message(quality="poor"))

    async def test_start_binary_done(self, server):
        async with socket_client(server.url) as client:
            await client.say(start_message())
            done = await client.rest()
        assert client.log == [
            "video.start", *["video.chunk_metadata", "binary"] * 3, "session.done",
        ]  # fmt: skip
        assert (done["chunks"], done["stopped"]) == (3, False)
        assert client.video[4:8] == b"ftyp"

    async def test_exactly_one_picture_by_url(self, server):
        for reference in ([{"image_url": "data:,"}], {"file_id": "f"}, "data:,"):
            text = await refusal(server, start_message(image_reference=reference))
            assert "image_reference" in text

    async def test_other_formats(self, server):
        assert "format" in await refusal(server, start_message(format="webm"))

    async def test_the_first_message_must_be_a_start(self, server):
        assert "session.start" in await refusal(server, {"type": "session.stop"})

    async def test_pictures_cannot_come_encoded(self, server):
        text = await refusal(server, start_message(extra_params={"preencode_mp4": True}))
        assert "preencode_mp4" in text

    async def test_other_extra_params_reach_the_engine(self, server):
        extra = {"flow_shift": 3.5, "camera_action_script": [[["w"], [], ["L"]]] * 3}
        async with socket_client(server.url) as client:
            await client.say(start_message(extra_params=extra))
            await client.rest()
        request = next(iter(server.executor.requests.values()))
        assert request.flow_shift == 3.5
        assert request.camera.chunks[2] == (frozenset("w"), frozenset(), frozenset("l"))

    async def test_encoder_options_change_the_bytes(self, server):
        async def play(**changes: object) -> bytes:
            async with socket_client(server.url) as client:
                await client.say(start_message(**changes))
                await client.rest()
                return client.video

        options = {"video_codec_options": {"preset": "veryfast", "crf": 40}}
        assert len(await play(extra_params=options)) != len(await play())


class TestStream:
    async def test_a_trailer_follows_the_last_chunk(self, server, monkeypatch):
        def late(self) -> bytes:
            self.close()
            return b"the rest"

        monkeypatch.setattr(ChunkEncoder, "finish", late)
        async with socket_client(server.url) as client:
            await client.say(start_message(num_frames=9))
            await client.chunk()
            metadata, payload = await client.chunk()
            done = await client.expect("session.done")
        assert payload == b"the rest"
        assert (metadata["kind"], metadata["num_frames"]) == ("trailer", 0)
        assert metadata["generation_chunk_index"] is None
        assert metadata["transport_chunk_index"] == 1
        assert done["chunks"] == 2

    async def test_an_error_of_the_generation_ends_without_done(self, server):
        server.executor.failures[0, 1] = DeviceOutOfMemoryError("no memory")
        async with socket_client(server.url) as client:
            await client.say(start_message())
            error = await client.error()
            assert await client.close_code() == 1000
        assert error["message"] == "no memory"
        assert client.log.count("binary") == 1
        assert "session.done" not in client.log

    async def test_a_long_generation_is_no_stall(self, server):
        # Every chunk is progress, however long they take together.
        server.executor.chunk_s = 0.4
        async with socket_client(server.url) as client:
            await client.say(start_message(num_frames=69))
            assert (await client.rest())["chunks"] == 6

    async def test_a_stall_aborts(self, server):
        server.executor.gate.clear()
        async with socket_client(server.url) as client:
            await client.say(start_message())
            assert "Stall timeout" in (await client.error())["message"]
            assert (await client.expect("session.done"))["stopped"]

    async def test_pings_are_answered_and_prevent_a_stall(self, server):
        server.executor.chunk_s = 3.0
        async with socket_client(server.url) as client:
            await client.say(start_message(num_frames=9))
            await client.expect("video.start")
            for _ in range(6):
                await client.say({"type": "session.ping"})
                assert await client.expect("session.pong") == {"type": "session.pong"}
                with pytest.raises(TimeoutError):
                    await client.hear(0.4)
            assert (await client.rest())["chunks"] == 1


class TestInteractions:
    async def test_accepted(self, server):
        answer = await answer_to(server, camera_event("e"))
        assert (answer["type"], answer["event_id"]) == ("session.interaction.queued", "e")

    async def test_a_duplicate_even_with_the_same_payload(self, server):
        async with socket_client(server.url) as client:
            await client.say(ENDLESS)
            await client.chunk()
            await client.say(camera_event("e"))
            await client.say(camera_event("e"))
            await client.until("session.interaction.queued")
            error = await client.error()
        assert (error["code"], error["event_id"]) == ("event_id_conflict", "e")

    @pytest.mark.parametrize("chunks", [None, 0, 2, 3.0])
    async def test_transition_chunks_default_and_integral_floats(self, server, chunks):
        answer = await answer_to(server, camera_event("e", transition_chunks=chunks))
        assert answer["type"] == "session.interaction.queued"

    @pytest.mark.parametrize("chunks", ["2", 2.9, True, -1])
    async def test_other_transition_chunks(self, server, chunks):
        answer = await answer_to(server, camera_event("e", transition_chunks=chunks))
        assert answer["type"] == "error"
        assert "transition_chunks" in answer["message"]

    async def test_a_blank_prompt(self, server):
        answer = await answer_to(server, camera_event("e", event={"prompt": " "}))
        assert (answer["type"], "prompt" in answer["message"]) == ("error", True)

    async def test_an_engine_that_refuses(self, server, monkeypatch):
        def full(*_: object) -> None:
            raise InteractionError("256 events wait")

        monkeypatch.setattr(InteractionBox, "submit", full)
        answer = await answer_to(server, camera_event("e"))
        assert (answer["code"], answer["event_id"]) == ("interaction_failed", "e")

    async def test_prompt_and_camera_at_once_reach_the_workers_unchanged(self, server):
        event = camera_event("e")["interaction"]["event"] | {"prompt": "rain at night"}
        async with socket_client(server.url) as client:
            await client.say(ENDLESS)
            await client.chunk()
            await client.say(camera_event("e", event=event, transition_chunks=0))
            while "e" not in (metadata := (await client.chunk())[0])["started_event_ids"]:
                pass
        index = metadata["generation_chunk_index"]
        plan = next(p for p in server.executor.plans if p.chunk_index == index)
        assert (plan.prompt.prompt.text, plan.prompt.weight) == ("rain at night", 1.0)
        assert plan.poses[-1][2, 3] > 0


def test_the_default_encoder_is_the_public_one():
    assert EncoderOptions().ffmpeg_options() == {
        "preset": "ultrafast", "crf": "18", "tune": "zerolatency",
    }  # fmt: skip
