"""What a client says while its world runs: bad messages, interactions, resets."""

import asyncio
import json

import pytest

from tests.helpers.local_server import NoImages, local_server
from tests.helpers.socket_client import camera_event, picture_url, socket_client, start_message
from tests.helpers.socket_fixtures import server
from vllm_omni.engine.session import MAX_RESETS

__all__ = ["server"]

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]

ENDLESS = start_message(num_frames=None, unbounded=True)


class TestControl:
    @pytest.mark.parametrize(
        ("message", "words"),
        [
            ("{", "not valid JSON"),
            ("3", "object"),
            (b"stop", "binary frames"),
            ({"type": "session.pause"}, "Unknown message type"),
            ({"no": "type"}, "Unknown message type"),
            (start_message(), "Unknown message type"),
            ("x" * 131_073, "at most 131072"),
            ({"type": "session.interaction"}, "interaction: is required"),
            (camera_event(event={}), "needs a prompt or multi_modal_data"),
            (camera_event(event=[1]), "event"),
            (camera_event(event={"prompt": "  "}), "prompt"),
            (camera_event(event={"prompt": "x", "negative_prompt": "y"}), "negative_prompt"),
            (camera_event(event={"multi_modal_data": {"camera": 1}}), "camera"),
            (json.dumps(camera_event()).replace("0.05", "1e400"), "finite"),
            (json.dumps(camera_event()).replace("0.05", "NaN"), "not valid JSON"),
            (camera_event(transition_chunks="2"), "transition_chunks"),
            (camera_event(transition_chunks=True), "transition_chunks"),
            (camera_event(transition_chunks=2.9), "transition_chunks"),
            (camera_event(transition_chunks=-1), "transition_chunks"),
            ({"type": "session.reset", "prompt": " "}, "prompt"),
            (
                {"type": "session.reset", "image_reference": {"image_url": "ftp://h/x"}},
                "http(s) URL",
            ),
        ],
        ids=lambda value: repr(value)[:60],
    )
    async def test_a_bad_message_is_answered_and_the_session_goes_on(self, server, message, words):
        async with socket_client(server.url) as client:
            await client.say(ENDLESS)
            await client.chunk()
            await client.say(message)
            answer = await client.error()
            assert words in answer["message"]
            assert answer["request_id"].startswith("video_stream-")
            await client.chunk()
            await client.say({"type": "session.stop"})
            assert (await client.rest())["stopped"]

    async def test_interactions_are_queued_applied_and_reported(self, server):
        async with socket_client(server.url) as client:
            await client.say(ENDLESS)
            await client.chunk()
            await client.say(camera_event("k-1"))
            assert (await client.until("session.interaction.queued"))["event_id"] == "k-1"
            while not (metadata := (await client.chunk())[0])["started_event_ids"]:
                pass
            assert metadata["started_event_ids"] == metadata["active_event_ids"] == ["k-1"]
            index = metadata["generation_chunk_index"]
            assert metadata["applied"]["k-1"] in range(3 * index, 3 * index + 3)
        poses = next(p for p in server.executor.plans if p.chunk_index == index).poses
        assert poses[-1][2, 3] > 0

    async def test_an_id_is_made_up_and_a_repeated_one_refused(self, server):
        async with socket_client(server.url) as client:
            await client.say(ENDLESS)
            await client.chunk()
            await client.say(camera_event())
            assert len((await client.until("session.interaction.queued"))["event_id"]) == 32
            await client.say(camera_event("twice"))
            await client.until("session.interaction.queued")
            await client.say(camera_event("twice"))
            answer = await client.error()
            assert (answer["code"], answer["event_id"]) == ("event_id_conflict", "twice")
            assert answer["request_id"].startswith("video_stream-")

    @pytest.mark.parametrize(
        "camera",
        [
            {"mode": "absolute"},
            {"mode": "velocity", "data": {"translation": [0, 0]}},
            {"mode": "velocity", "data": {"translation": [0, 0, 1e300]}},
            {"mode": "velocity", "data": {"rotation": [0, 0, 0, 0]}},
            {"mode": "velocity", "data": {"actions": ["w"]}},
        ],
        ids=str,
    )
    async def test_a_payload_that_cannot_be_applied_is_refused_and_its_id_stays_free(
        self, server, camera
    ):
        event = {"multi_modal_data": {"camera": camera}}
        async with socket_client(server.url) as client:
            await client.say(ENDLESS)
            await client.chunk()
            await client.say(camera_event("again", event=event))
            answer = await client.error()
            assert answer["event_id"] == "again"
            assert answer["code"] == "interaction_failed"
            await client.say(camera_event("again"))
            await client.until("session.interaction.queued")

    async def test_unknown_modalities_are_refused_by_name(self, server):
        async with socket_client(server.url) as client:
            await client.say(ENDLESS)
            await client.chunk()
            await client.say(camera_event("m", event={"multi_modal_data": {"sound": {}}}))
            answer = await client.error()
            assert answer["code"] == "interaction_failed"
            assert "'sound' is not supported; supported: prompt, camera" in answer["message"]

    async def test_two_thousand_interactions_in_one_chunk(self, server):
        executor = server.executor
        async with socket_client(server.url) as client:
            await client.say(ENDLESS)
            await client.chunk()
            executor.gate.clear()

            async def press() -> None:
                text = json.dumps(camera_event("e#"))
                for index in range(2_000):
                    await client.say(text.replace("#", str(index)))

            pressing = asyncio.create_task(press())
            queued = 0
            while queued < 2_000:
                message = await client.hear()
                assert isinstance(message, bytes) or message["type"] != "error"
                queued += not isinstance(message, bytes) and "queued" in message["type"]
            await pressing
            executor.gate.set()
            started: list[str] = []
            while "e1999" not in started:
                started += (await client.chunk())[0]["started_event_ids"]
            # Every event is reported once; the newest one is applied, however many came.
            assert sorted(started) == sorted(f"e{index}" for index in range(2_000))
            assert started[-1] == "e1999"


class TestReset:
    async def test_reset_restarts_with_what_it_names(self, server):
        async with socket_client(server.url) as client:
            await client.say(ENDLESS)
            await client.chunk()
            await client.say(
                {"type": "session.reset", "prompt": " night   falls ", "seed": 11,
                 "image_reference": {"image_url": picture_url(5)}}
            )  # fmt: skip
            done = await client.until("session.reset.done")
            metadata, _ = await client.chunk()
            assert metadata["generation_chunk_index"] == 0
            assert metadata["num_frames"] == 9
            assert metadata["transport_chunk_index"] == client.log.count("binary") - 1
            assert done["request_id"] == metadata["request_id"]
        request = next(iter(server.executor.requests.values()))
        assert (request.prompt.text, request.seed) == ("night falls", 11)

    async def test_reset_before_the_session_exists_is_refused(self):
        with local_server(images=NoImages()) as server:
            async with socket_client(server.url) as client:
                await client.say(start_message())
                await client.expect("video.start")
                await client.say({"type": "session.reset"})
                assert "being prepared" in (await client.expect("error"))["message"]

    async def test_resets_in_one_chunk_are_bounded_and_the_last_one_wins(self, server):
        server.executor.gate.clear()
        async with socket_client(server.url) as client:
            await client.say(ENDLESS)
            await client.expect("video.start")
            assert await asyncio.to_thread(server.executor.at_gate.wait, 20)
            for seed in range(1, 1 + MAX_RESETS):
                await client.say({"type": "session.reset", "seed": seed})
                await client.say({"type": "session.ping"})
                await client.until("session.pong")
            for _ in range(20):
                await client.say({"type": "session.reset", "seed": 0})
            for _ in range(20):
                assert "resets" in (await client.error())["message"]
            server.executor.gate.set()
            await client.until("session.reset.done")
        assert next(iter(server.executor.requests.values())).seed == MAX_RESETS
