"""Two ranks behind the same doors: offline, served, and after one of them was killed."""

import asyncio
import re
import time

import numpy as np
import psutil
import pytest

from tests.helpers.fixtures.carriers import KILLED, carrier, carrier_flags, raylets
from tests.helpers.server import CPU_TINY, RealServer, real_server, tiny_server
from tests.helpers.socket_client import picture_url, socket_client, start_message
from tests.helpers.tiny import tiny_checkpoint_dir
from vllm_omni import Omni
from vllm_omni.diffusion.utils.media_utils import finalize_streaming_video_bytes
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

__all__ = ["carrier", "carrier_flags", "raylets", "tiny_server"]

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.omni,
    pytest.mark.parallel,
    pytest.mark.cpu,
    pytest.mark.timing,
]

KEYS = {"camera_action_script": [[["w"], ["w", "j"], []], [["d"], ["d"], ["k"]], [["s"]] * 3]}
WORLD = start_message(prompt="a desert", seed=3, extra_params=KEYS)
TOLD_S = 1.0
RECOVERY_S = 120.0
"""Recovery takes about five seconds, by Ray ten; this allows for a busy machine."""


async def play(url: str) -> bytes:
    """All bytes of one session."""
    async with socket_client(url) as client:
        await client.say(WORLD)
        await client.until("session.done", RECOVERY_S)
        return client.video


@pytest.fixture(scope="module")
def served_by_one(tiny_server) -> bytes:
    """The stream of a server of one rank."""
    return asyncio.run(play(tiny_server.url))


@pytest.fixture(scope="module")
def two_ranks(carrier, carrier_flags):
    """A server of two ranks; where Ray carries them, they make the video, too."""
    flags = ["--encode-on", "worker" if carrier == "ray" else "api"]
    with real_server("--ulysses-degree", "2", *carrier_flags, *flags) as server:
        print(f"two ranks ready after {server.ready_s:.1f} s")
        yield server


def ranks_of(server: RealServer, carrier: str) -> list[psutil.Process]:
    """The worker processes, in the order in which they were started."""
    if carrier == "ray":  # The raylets of the fixture have started them.
        family = psutil.Process().children(recursive=True)
        return [one for one in family if "ray::RankActor" in " ".join(one.cmdline())]
    family = server.api.children(recursive=True)
    forks = [process for process in family if "forkserver" in " ".join(process.cmdline())]
    parents = {process.ppid() for process in forks}
    return sorted((process for process in forks if process.pid not in parents), key=lambda p: p.pid)


@pytest.mark.advanced_model
async def test_the_stream_is_that_of_one_rank(two_ranks, carrier, served_by_one):
    # Bitwise: the same pixels give the same bytes.
    assert len(ranks_of(two_ranks, carrier)) == 2
    assert await play(two_ranks.url) == served_by_one


async def test_a_killed_rank_costs_its_session_and_nothing_else(two_ranks, carrier, served_by_one):
    async with socket_client(two_ranks.url) as client:
        await client.say(start_message(num_frames=None, unbounded=True))
        await client.chunk()
        ranks = ranks_of(two_ranks, carrier)
        ranks[1].kill()
        killed_s = time.monotonic()
        error = await client.error()
        told_s = time.monotonic() - killed_s
    assert error["code"] == "worker_restarted"
    assert re.search(f"rank [01] {KILLED[carrier]}", error["message"])
    # The next session waits for the new group.
    assert await play(two_ranks.url) == served_by_one
    recovered_s = time.monotonic() - killed_s
    print(f"client told after {told_s:.2f} s, the next world complete after {recovered_s:.2f} s")
    assert told_s < TOLD_S
    assert not any(rank.is_running() for rank in ranks)
    assert len(ranks_of(two_ranks, carrier)) == 2


async def test_a_server_that_is_to_end_tells_its_viewer_and_leaves_nothing(two_ranks, carrier):
    async with socket_client(two_ranks.url) as client:
        await client.say(start_message(num_frames=None, unbounded=True))
        await client.chunk()
        ranks, logged = ranks_of(two_ranks, carrier), len(two_ranks.log)
        ending = asyncio.create_task(asyncio.to_thread(two_ranks.terminate, RECOVERY_S))
        assert (await client.error())["code"] == "server_draining"
    assert await ending == 0
    _, alive = psutil.wait_procs(ranks, timeout=RECOVERY_S)
    assert not alive
    assert "Traceback" not in two_ranks.log[logged:]
    assert "SIGTERM received" not in two_ranks.log[logged:]  # what Ray's own handler writes


@pytest.fixture(scope="module")
def offline_videos():
    """Pixels by number of ranks."""
    made = {}
    for ranks in (1, 2):
        with Omni(
            str(tiny_checkpoint_dir()),
            deploy_config=str(CPU_TINY),
            ulysses_degree=ranks,
        ) as omni:
            params = OmniDiffusionSamplingParams(
                height=64, width=96, num_frames=33, seed=3, fps=16, extra_args=KEYS
            )
            prompt = {"prompt": "a desert", "multi_modal_data": {"image": picture_url()}}
            made[ranks] = [output.images[0] for output in omni.generate(prompt, params)]
    return made


def test_offline_pixels_do_not_depend_on_the_ranks(offline_videos):
    # Bitwise.
    assert [len(chunk) for chunk in offline_videos[1]] == [9, 12, 12]
    for one, two in zip(offline_videos[1], offline_videos[2], strict=True):
        assert np.array_equal(one, two)


def test_offline_and_served_are_the_same_world(offline_videos, served_by_one):
    # Bitwise: offline pixels through the server's encoder give the server's bytes.
    from vllm_omni.outputs.media import ChunkEncoder

    encoder = ChunkEncoder(96, 64, 16)
    stream = b"".join(encoder.encode(chunk) for chunk in offline_videos[2])
    assert stream == served_by_one
    assert finalize_streaming_video_bytes(stream, input_format="m4s", fps=16)[4:8] == b"ftyp"
