"""A server whose workers make the video: the bytes of one that makes it itself."""

import asyncio

import httpx
import pytest

from tests.helpers.faulty_serve import fault_prompt
from tests.helpers.server import FAULTY, real_server, tiny_server
from tests.helpers.socket_client import picture_url, play, socket_client, start_message

__all__ = ["tiny_server"]

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.omni,
    pytest.mark.parallel,
    pytest.mark.cpu,
    pytest.mark.timing,
]

FAULT = "the session failed inside the server; its log says why"


@pytest.fixture(scope="module")
def encoding():
    with real_server("--max-num-seqs", "2", "--encode-on", "worker", program=FAULTY) as server:
        yield server


async def steered(url: str, prompt: str, quality: float) -> bytes:
    """A world whose prompt changes in its second chunk and that begins anew after it.

    No chunk is made before it is due, so an event that is sent at once is in time for the next.
    """
    switch = {"event_id": "e", "event": {"prompt": "a desert"}}
    async with socket_client(url) as client:
        options = {"video_codec_options": {"crf": quality}}
        steady = {"max_lead_ms": 0, "fps": 12, "num_frames": None, "unbounded": True}
        await client.say(start_message(prompt=prompt, extra_params=options, **steady))
        await client.chunk()
        await client.say({"type": "session.interaction", "interaction": switch})
        metadata, _ = await client.chunk()
        assert metadata["applied"].keys() == {"e"}
        await client.say({"type": "session.reset", "seed": 9})
        again, _ = await client.chunk()
        assert again["generation_chunk_index"] == 0
        await client.chunk()
        return client.video


async def test_two_worlds_at_once_with_another_prompt_and_begun_anew(tiny_server, encoding):
    """Bitwise."""
    worlds = [("a harbour", 18.0), ("a castle", 30.0)]
    urls = (tiny_server.url, encoding.url)
    made = await asyncio.gather(*(steered(url, *world) for url in urls for world in worlds))
    assert made[:2] == made[2:]
    assert made[0] != made[1]


async def test_an_encoder_that_fails_costs_its_world_alone(tiny_server, encoding):
    async with socket_client(encoding.url) as failing:
        other = asyncio.create_task(play(encoding.url))
        await failing.say(start_message(prompt=fault_prompt("bug", "encode", 1)))
        error = await failing.error()
        assert await failing.close_code() == 1000
    assert (error["message"], error.get("code")) == (FAULT, None)
    assert failing.log.count("binary") == 1
    assert await other == await play(tiny_server.url)
    encoding.wait_idle()
    assert encoding.metric("worker_restarts_total") == 0
    assert "injected secret" in encoding.log


def test_a_whole_video_is_made_of_pixels_as_ever(tiny_server, encoding):
    """Bitwise."""
    form = {"prompt": "a harbour", "num_frames": "9", "size": "96x64", "seed": "1"}
    form["image_reference"] = f'{{"image_url": "{picture_url()}"}}'
    videos = [
        httpx.post(f"{server.address}/v1/videos/sync", data=form, timeout=60)
        for server in (tiny_server, encoding)
    ]
    assert [video.status_code for video in videos] == [200, 200]
    assert videos[0].content == videos[1].content
