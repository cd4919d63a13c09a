"""A real server, real sockets, real worker processes: what is streamed is what offline makes."""

import asyncio
import io

import av
import numpy as np
import pytest

from tests.helpers.server import real_server, tiny_server
from tests.helpers.socket_client import (
    camera_event,
    picture_url,
    socket_client,
    start_message,
)
from tests.helpers.tiny import tiny_checkpoint_dir
from vllm_omni import AsyncOmni
from vllm_omni.diffusion.utils.media_utils import finalize_streaming_video_bytes
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.outputs.media import ChunkEncoder

__all__ = ["tiny_server"]

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.omni,
    pytest.mark.parallel,
    pytest.mark.cpu,
    pytest.mark.timing,
]

KEYS = {"camera_action_script": [[["w"], ["w", "j"], []], [["d"], ["d"], ["k"]], [["s"]] * 3]}
WORLDS = {
    "still": start_message(),
    "walk": start_message(prompt="a desert", seed=3, extra_params=KEYS),
    "another picture": start_message(image_reference={"image_url": picture_url(9)}, seed=-5),
}


async def play(url: str, message: dict) -> bytes:
    """All bytes of one session."""
    async with socket_client(url) as client:
        await client.say(message)
        done = await client.rest()
        assert not done["stopped"]
        assert await client.close_code() == 1000
        return client.video


@pytest.fixture(scope="module")
def offline():
    """The bytes that offline pixels and an encoder of our own give, by world."""
    # Without a deploy file: nothing is shared with the server but the checkpoint.
    omni = AsyncOmni(
        str(tiny_checkpoint_dir()), streaming_output=True, step_execution=True, device="cpu",
        dtype="float32",
    )  # fmt: skip

    async def one(message: dict) -> bytes:
        picture = message["image_reference"]["image_url"]
        params = OmniDiffusionSamplingParams(
            height=64, width=96, num_frames=33, seed=message["seed"], fps=16,
            extra_args=message.get("extra_params", {}),
        )  # fmt: skip
        prompt = {"prompt": message["prompt"], "multi_modal_data": {"image": picture}}
        encoder = ChunkEncoder(96, 64, 16)
        return b"".join(
            [encoder.encode(output.images[0]) async for output in omni.generate(prompt, params)]
        )

    async def every() -> dict[str, bytes]:
        return {name: await one(message) for name, message in WORLDS.items()}

    made = asyncio.run(every())
    omni.shutdown()
    return made


@pytest.mark.parametrize("world", WORLDS)
async def test_a_stream_is_the_offline_rollout(tiny_server, offline, world):
    # Bitwise: the same pixels give the same bytes.
    assert await play(tiny_server.url, WORLDS[world]) == offline[world]


def test_worlds_differ(offline):
    assert len(set(offline.values())) == len(WORLDS)


async def test_two_sessions_at_once_are_each_as_if_alone(tiny_server, offline):
    names = ("still", "walk")
    videos = await asyncio.gather(*(play(tiny_server.url, WORLDS[name]) for name in names))
    # Bitwise.
    assert videos == [offline[name] for name in names]


async def test_sessions_in_line_are_each_as_if_alone(tiny_server, offline):
    names = list(WORLDS) * 2
    videos = await asyncio.gather(*(play(tiny_server.url, WORLDS[name]) for name in names))
    assert videos == [offline[name] for name in names]


async def test_a_reset_world_is_a_fresh_one(tiny_server):
    fine = {"video_codec_options": {"crf": 1}}
    fresh = await play(tiny_server.url, start_message(extra_params=fine))
    async with socket_client(tiny_server.url) as client:
        await client.say(start_message(num_frames=None, unbounded=True, seed=1, extra_params=fine))
        await client.chunk()
        await client.say(camera_event())
        await client.until("session.interaction.queued")
        await client.chunk()
        await client.chunk()
        await client.say({"type": "session.reset", "seed": start_message()["seed"]})
        await client.until("session.reset.done")
        for _ in range(3):
            await client.chunk()
    # Lossy: the encoder's rate control remembers what came before (tests/entrypoints/
    # test_async_omni.py compares the pixels themselves). Its loss is a fraction of a grey level.
    again, first = frames_of(client.video)[-33:].astype(float), frames_of(fresh).astype(float)
    assert np.abs(again - first).mean() < 1.0
    assert np.abs(first - frames_of(client.video)[:33]).mean() > 10.0


@pytest.mark.advanced_model
async def test_two_servers_give_the_same_bytes(tiny_server):
    with real_server() as other:
        ours, theirs = await asyncio.gather(
            play(tiny_server.url, WORLDS["walk"]), play(other.url, WORLDS["walk"])
        )
    assert ours == theirs


async def test_the_bytes_are_a_playable_video(tiny_server):
    video = await play(tiny_server.url, WORLDS["still"])
    with av.open(io.BytesIO(video)) as container:
        times = [float(frame.time) for frame in container.decode(video=0)]
    assert times == pytest.approx([index / 16 for index in range(33)])
    finished = finalize_streaming_video_bytes(video, input_format="m4s", fps=16)
    assert np.array_equal(frames_of(finished), frames_of(video))


async def test_a_prompt_event_changes_the_world_and_ends_after_its_transition(tiny_server):
    async with socket_client(tiny_server.url) as client:
        await client.say(start_message(num_frames=None, unbounded=True))
        await client.chunk()
        event = {"prompt": "a burning city at night"}
        await client.say(camera_event("p", event=event, transition_chunks=2))
        await client.until("session.interaction.queued")
        started, completed = [], []
        while not completed:
            metadata, _ = await client.chunk()
            index = metadata["generation_chunk_index"]
            started += [index] * ("p" in metadata["started_event_ids"])
            completed += [index] * ("p" in metadata["completed_event_ids"])
        assert completed == [started[0] + 1]


async def test_nothing_of_torch_is_in_the_api_process(tiny_server):
    maps = tiny_server.api.memory_maps()
    assert not [m.path for m in maps if "libtorch" in m.path]


def frames_of(video: bytes) -> np.ndarray:
    """All pictures as they decode."""
    with av.open(io.BytesIO(video)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


async def test_without_a_deploy_file_a_world_starts_and_is_steered():
    with real_server(deploy=None) as server:
        async with socket_client(server.url) as client:
            await client.say(start_message())
            await client.chunk()
            await client.say(camera_event("walk"))
            await client.until("session.interaction.queued")
            assert not (await client.rest())["stopped"]
