"""The client in the package, against scripts, and against a real server."""

import asyncio
import json
import subprocess
import sys

import av
import numpy as np
import pytest

from tests.helpers.local_server import MODEL, local_server
from tests.helpers.scripted_server import Peer, scripted_server
from tests.helpers.server import tiny_server
from tests.helpers.videos import PICTURE
from vllm_omni.client import (
    CannotConnectError,
    ConnectionLostError,
    EventRefusedError,
    KeyRefusedError,
    Pose,
    ProtocolError,
    SyncWorldClient,
    WorldClient,
    WorldRefusedError,
)
from vllm_omni.client.address import http_url, socket_url
from vllm_omni.config.server import ServerConfig
from vllm_omni.diffusion.utils.media_utils import finalize_streaming_video_bytes
from vllm_omni.errors import InvalidRequestError

__all__ = ["tiny_server"]

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]

IMAGE = "data:image/png;base64,AAAA"


def test_the_client_loads_no_torch():
    code = "import vllm_omni.client, sys; assert not {'torch', 'av'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("address", "socket", "health"),
    [
        ("http://h:1", "ws://h:1/v1/realtime/video", "http://h:1/health"),
        ("h:9", "ws://h:9/v1/realtime/video", "http://h:9/health"),
        ("wss://h/p/v1/realtime/video", "wss://h/p/v1/realtime/video", "https://h/p/health"),
    ],
)
def test_addresses(address, socket, health):
    assert socket_url(address) == socket
    assert http_url(address, "/health") == health
    assert socket_url(socket) == socket


async def whole(peer: Peer):
    await peer.tell("session.queued", request_id="r", position=2)
    await peer.tell("session.queued", request_id="r", position=1)
    await peer.video_start()
    await peer.tell("session.something_new", detail=1)
    await peer.chunk(0, 9, b"first")
    await peer.chunk(1, 12, b"second")
    await peer.payload(b"end", kind="trailer", num_frames=0, generation_chunk_index=None)
    await peer.done()


async def test_a_world_from_the_line_to_its_end():
    places = []
    async with scripted_server(whole) as server:
        async with WorldClient(server.url, api_key="k") as world:
            await world.start(b"png", "harbour", num_frames=21, seed=3, on_position=places.append)
            assert world.position is None
            chunks = [chunk async for chunk in world]
        (peer,) = server.peers
    assert places == [2, 1]
    assert peer.start == {
        "type": "session.start", "prompt": "harbour", "queue": True, "fps": 16, "num_frames": 21,
        "seed": 3, "image_reference": {"image_url": "data:image/png;base64,cG5n"},
    }  # fmt: skip
    assert peer.socket.request.headers["Authorization"] == "Bearer k"
    assert [(chunk.index, chunk.num_frames, chunk.data) for chunk in chunks] == [
        (0, 9, b"first"), (1, 12, b"second"),
    ]  # fmt: skip
    assert world.video == b"firstsecondend"
    assert world.done.stopped is False


async def test_what_a_viewer_says():
    async def script(peer: Peer):
        await peer.video_start()
        await peer.until("session.stop")
        await peer.done(stopped=True)

    async with scripted_server(script) as server:
        async with WorldClient(server.url, keep_video=False) as world:
            await world.start(IMAGE, "p", size=(96, 64))
            ids = [
                await world.steer("W"),
                await world.steer(velocity=Pose((0, 0, 0.01))),
                await world.steer(target=Pose(), transition_chunks=2),
                await world.prompt("rain", blend=1),
            ]
            await world.reset(prompt="sun", seed=4)
            await world.stop()
            assert [chunk async for chunk in world] == []
            with pytest.raises(ValueError, match="exactly one"):
                await world.steer("w", velocity=Pose())
            with pytest.raises(ValueError, match="'x'"):
                await world.steer("x")
        (peer,) = server.peers
    assert peer.start.items() >= {"unbounded": True, "width": 96, "height": 64}.items()
    said = [message["interaction"] for message in peer.received[:4]]
    assert [one["event_id"] for one in said] == ids == [f"event-{n}" for n in (1, 2, 3, 4)]
    cameras = [one["event"]["multi_modal_data"]["camera"] for one in said[:3]]
    still = [0, 0, 0, 1]
    assert cameras == [
        {"mode": "velocity", "data": {"translation": [0, 0, 0.05], "rotation": still}},
        {"mode": "velocity", "data": {"translation": [0, 0, 0.01], "rotation": still}},
        {"mode": "target", "data": {"translation": [0, 0, 0], "rotation": still}},
    ]
    assert [one.get("transition_chunks") for one in said] == [None, None, 2, 1]
    assert peer.received[4:] == [
        {"type": "session.reset", "prompt": "sun", "seed": 4}, {"type": "session.stop"},
    ]  # fmt: skip
    assert world.done.stopped is True


@pytest.mark.parametrize(
    ("steps", "error", "words"),
    [
        ("start bad close", WorldRefusedError, "no picture"),
        ("start full", WorldRefusedError, "the line is full"),
        ("full", WorldRefusedError, "the line is full"),
        ("start chunk close", ConnectionLostError, "before session.done"),
        ("start stray", ProtocolError, "without metadata"),
        ("start text", ProtocolError, "not valid JSON"),
        ("done", WorldRefusedError, "before it began"),
    ],
)
async def test_ends_of_a_world_have_types(steps, error, words):
    async def script(peer: Peer):
        acts = {
            "start": peer.video_start,
            "chunk": lambda: peer.chunk(0),
            "bad": lambda: peer.tell("error", message="no picture", code="invalid_request"),
            "full": lambda: peer.tell("error", message="the line is full", code="server_full"),
            "stray": lambda: peer.socket.send(b"stray"),
            "text": lambda: peer.socket.send("hello"),
            "close": peer.socket.close,
            "done": peer.done,
        }
        for step in steps.split():
            await acts[step]()
        await peer.socket.wait_closed()

    async with scripted_server(script) as server, WorldClient(server.url) as world:

        async def live() -> None:
            await world.start(IMAGE, "p")
            async for _ in world:
                pass

        with pytest.raises(error, match=words) as caught:
            await live()
        assert type(caught.value) is error
        if error is WorldRefusedError and steps != "done":
            assert caught.value.code in {"invalid_request", "server_full"}


async def test_a_refused_event_leaves_the_world_readable():
    async def script(peer: Peer):
        await peer.video_start()
        await peer.chunk(0)
        refusal = {"code": "interaction_failed", "event_id": "e-1"}
        await peer.tell("error", message="no such camera", **refusal)
        await peer.chunk(1)
        await peer.tell("error", message="reset: no picture", code="invalid_request")
        await peer.done()

    async with scripted_server(script) as server, WorldClient(server.url) as world:
        await world.start(IMAGE, "p")
        seen = [(await anext(world)).index]
        with pytest.raises(EventRefusedError, match="no such camera") as caught:
            await anext(world)
        assert caught.value.event_id == "e-1"
        seen.append((await anext(world)).index)
        with pytest.raises(EventRefusedError, match="no picture"):
            await anext(world)
        assert [chunk async for chunk in world] == []
    assert seen == [0, 1]


async def test_signs_of_life():
    async def script(peer: Peer):
        await peer.until("session.ping")
        await peer.video_start()
        await peer.done()

    async with (
        scripted_server(script) as server,
        WorldClient(server.url, ping_interval_s=0.02) as world,
    ):
        await asyncio.wait_for(world.start(IMAGE, "p"), 10)


async def test_leaving_after_the_end_of_a_world_raises_only_what_the_body_does():
    async def script(peer: Peer):
        await peer.video_start()
        await peer.done()

    async def stayed(fault: Exception | None) -> None:
        async with WorldClient(server.url, ping_interval_s=0.05) as world:
            await world.start(IMAGE, "p")
            assert [chunk async for chunk in world] == []
            await asyncio.sleep(0.5)  # pings go to a socket that the server has closed
            if fault is not None:
                raise fault

    async with scripted_server(script) as server:
        await stayed(None)
        with pytest.raises(LookupError, match="of the body"):
            await stayed(LookupError("of the body"))


async def test_a_cancelled_close_closes_the_socket():
    async def script(peer: Peer):
        await peer.video_start()
        await peer.socket.wait_closed()
        closed.set()

    closed = asyncio.Event()
    async with scripted_server(script) as server:
        world = WorldClient(server.url)
        await world.connect()
        await world.start(IMAGE, "p")
        closing = asyncio.create_task(world.close())
        asyncio.get_running_loop().call_soon(closing.cancel)
        with pytest.raises(asyncio.CancelledError):
            await closing
        await asyncio.wait_for(closed.wait(), 5)


async def test_no_server():
    world = WorldClient("http://127.0.0.1:1")
    with pytest.raises(CannotConnectError, match="cannot connect to ws://127"):
        await world.connect()
    with pytest.raises(CannotConnectError, match="cannot connect"):
        await world.capabilities()
    with pytest.raises(CannotConnectError, match="not ready after 0 s; no answer"):
        await world.wait_ready(0)
    with pytest.raises(ConnectionLostError, match="no connection yet"):
        await world.stop()
    with pytest.raises(InvalidRequestError):
        world.save("v.mp4")


def test_calls_outside_with_raise_instead_of_waiting():
    world = SyncWorldClient("http://127.0.0.1:1")
    for call in (world.capabilities, world.stop, lambda: next(iter(world))):
        with pytest.raises(ConnectionLostError, match="use `with SyncWorldClient"):
            call()
        with pytest.raises(CannotConnectError), world:  # ends the thread, so the next is outside
            pass


def test_a_server_that_wants_a_key():
    with local_server(config=ServerConfig((MODEL,), api_keys=("key",))) as server:
        with pytest.raises(KeyRefusedError, match="API key"), SyncWorldClient(server.address):
            pass
        with SyncWorldClient(server.address, api_key="key") as world:
            assert (world.capabilities().width, world.capabilities().height) == (96, 64)


def test_a_walk_on_a_real_server_by_the_front_without_a_loop(tiny_server, tmp_path):
    (tmp_path / "first.png").write_bytes(PICTURE)
    frames, started = [], []
    with SyncWorldClient(f"http://127.0.0.1:{tiny_server.port}", decode=True) as world:
        world.start(tmp_path / "first.png", "A quiet harbour.", seed=7)
        walked = world.steer("w")
        for chunk in world:
            assert chunk.frames.shape == (chunk.num_frames, 64, 96, 3)
            frames.append(chunk.frames)
            started += chunk.started
            if len(frames) == 2:
                world.prompt("Fog rolls in.", blend=0)
            if len(frames) == 4:
                world.stop()
        world.save(tmp_path / "walk.mp4")
    assert world.done.stopped
    assert walked in started
    with av.open(str(tmp_path / "walk.mp4")) as video:
        once = np.stack([one.to_ndarray(format="rgb24") for one in video.decode(video=0)])
    # The same bytes through one decoder in parts, and through another at once.
    assert np.array_equal(np.concatenate(frames), once)
    with pytest.raises(InvalidRequestError):
        finalize_streaming_video_bytes(b"")


async def test_waiting_for_a_server_that_starts(tiny_server):
    address = f"ws://127.0.0.1:{tiny_server.port}"
    SyncWorldClient(address).wait_ready(5)  # in a thread that runs a loop, as a notebook's does
    with pytest.raises(CannotConnectError, match="not ready after 0 s; no answer"):
        SyncWorldClient("http://127.0.0.1:1").wait_ready(0)
    world = WorldClient(address)
    await world.wait_ready(5)
    told = await world.capabilities()
    assert json.loads(told.model_dump_json())["frames_per_chunk"] == 12
