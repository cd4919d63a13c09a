"""The example client: what it sends, what it saves, and steering from a real terminal."""

import asyncio
import io
import json
import os
import pty
import signal
import sys
import termios

import av
import numpy as np
import pytest

from examples.online_serving.streaming_video_generation import streaming_video_client as example
from examples.online_serving.streaming_video_generation.terminal_picture import drawn
from tests.helpers.scripted_server import Peer, scripted_server
from vllm_omni.errors import InvalidRequestError
from vllm_omni.outputs.media import ChunkEncoder

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]

IMAGE = "data:image/png;base64,AAAA"


def turned(payload: dict) -> np.ndarray:
    """Rotation matrix of a payload's quaternion, written independently of the client."""
    x, y, z, w = payload["data"]["rotation"]
    v = np.array([x, y, z])
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return (w * w - v @ v) * np.eye(3) + 2 * np.outer(v, v) + 2 * w * cross


class TestCameraPayload:
    @pytest.mark.parametrize(
        ("keys", "translation"),
        [
            ("", [0, 0, 0]),
            ("w", [0, 0, 0.05]),
            ("S", [0, 0, -0.05]),
            ("d", [0.05, 0, 0]),
            ("wa", [-0.05, 0, 0.05]),
            ("wsad", [0, 0, 0]),
        ],
    )
    def test_moving(self, keys, translation):
        payload = example.wasd_to_camera_payload(keys)
        assert payload["mode"] == "velocity"
        assert payload["data"]["translation"] == translation
        assert payload["data"]["rotation"] == [0, 0, 0, 1]

    def test_looking(self):
        """+X is right and +Y is down: l turns the view to +X by 6 degrees, i to -Y by 4."""
        forward = np.array([0, 0, 1])
        right = turned(example.wasd_to_camera_payload("l")) @ forward
        np.testing.assert_allclose(right, [np.sin(np.radians(6)), 0, np.cos(np.radians(6))])
        up = turned(example.wasd_to_camera_payload("i")) @ forward
        np.testing.assert_allclose(up, [0, -np.sin(np.radians(4)), np.cos(np.radians(4))])
        both = turned(example.wasd_to_camera_payload("jk"))
        yaw, pitch = (turned(example.wasd_to_camera_payload(key)) for key in "jk")
        np.testing.assert_allclose(both, yaw @ pitch, atol=1e-12)

    def test_a_step_follows_the_new_heading_on_the_ground(self):
        payload = example.wasd_to_camera_payload("wli")
        heading = turned(payload) @ [0, 0, 1] * [1, 0, 1]
        np.testing.assert_allclose(
            payload["data"]["translation"], 0.05 * heading / np.linalg.norm(heading), atol=1e-12
        )
        sideways = example.wasd_to_camera_payload("dl")
        np.testing.assert_allclose(
            sideways["data"]["translation"], 0.05 * turned(sideways)[:, 0], atol=1e-12
        )

    def test_other_keys_and_modes_are_refused(self):
        with pytest.raises(ValueError, match="x"):
            example.wasd_to_camera_payload("x")
        with pytest.raises(ValueError, match="absolute"):
            example.wasd_to_camera_payload("w", mode="absolute")
        assert example.wasd_to_camera_payload("w", mode="target")["mode"] == "target"


class TestMessages:
    def test_defaults(self):
        args = example.parse_args([])
        assert (args.host, args.port, str(args.output)) == (
            "127.0.0.1", 8000, "streaming_video_output.mp4",
        )  # fmt: skip
        start = example.start_message(args)
        # No size: the server's own.
        assert (start.width, start.height, start.fps, start.num_frames) == (None, None, 16, 429)
        assert (start.guidance_scale, start.unbounded, start.model) == (1.0, False, None)

    def test_every_flag_reaches_its_field(self, tmp_path):
        picture = tmp_path / "a.jpg"
        picture.write_bytes(b"jpeg")
        start = example.start_message(example.parse_args([
            "--model", "m", "--prompt", "p", "--size", "64x48", "--num-frames", "21", "--fps",
            "12.5", "--image-reference", str(picture), "--negative-prompt", "n",
            "--num-inference-steps", "4", "--guidance-scale-2", "2", "--boundary-ratio", "0.5",
            "--flow-shift", "3", "--true-cfg-scale", "1", "--seed", "9",
            "--extra-params", '{"action_path": "a"}', "--no-helios-distilled-preset",
        ]))  # fmt: skip
        given = start.rollout_fields()
        size = (given["width"], given["height"])
        assert (*size, given["num_frames"], given["fps"]) == (64, 48, 21, 12.5)
        assert given["image"] == "data:image/jpeg;base64,anBlZw=="
        assert given["extra_args"] == {"action_path": "a", "flow_shift": 3}
        assert (start.model, start.prompt, start.seed) == ("m", "p", 9)
        assert (start.guidance_scale_2, start.boundary_ratio, start.true_cfg_scale) == (2, 0.5, 1)

    @pytest.mark.parametrize(
        ("flags", "url"),
        [
            ([], "ws://127.0.0.1:8000/v1/realtime/video"),
            (["--host", "h", "--port", "9"], "ws://h:9/v1/realtime/video"),
            (["--base-url", "http://h:1"], "ws://h:1/v1/realtime/video"),
            (["--base-url", "https://h/proxy/"], "wss://h/proxy/v1/realtime/video"),
            (["--base-url", "ws://h"], "ws://h/v1/realtime/video"),
            (["--base-url", "wss://h/v1/realtime/video"], "wss://h/v1/realtime/video"),
        ],
    )
    def test_address(self, flags, url):
        assert example.endpoint_url(example.parse_args(flags)) == url

    @pytest.mark.parametrize("base", ["ftp://h", "h:9", "http://"])
    def test_other_addresses_are_refused(self, base, capsys):
        assert example.main(["--base-url", base, "--image-reference", IMAGE]) == 1
        assert "--base-url" in capsys.readouterr().err

    def test_length(self):
        unbounded = example.start_message(example.parse_args(["--unbounded"]))
        assert (unbounded.unbounded, unbounded.num_frames) == (True, None)
        flags = ["--seconds", "3", "--fps", "7", "--image-reference", IMAGE]
        given = example.start_message(example.parse_args(flags)).rollout_fields()
        assert given["num_frames"] == 21

    def test_a_bad_value_is_named(self):
        with pytest.raises(InvalidRequestError, match="size"):
            example.start_message(example.parse_args(["--size", "big"]))

    def test_schedule(self):
        schedule = example.scheduled_interactions(
            [{"at": 2, "prompt": "rain"}, {"at": 0.5, "prompt": "sun", "transition_chunks": 0}],
            [{"at": 2, "actions": ["w"], "transition_chunks": 3},
             {"at": 1, "camera": {"mode": "target", "data": {}}}],
        )  # fmt: skip
        sent = [(at, message.interaction.model_dump(exclude_none=True)) for at, message in schedule]
        assert sent == [
            (0.5, {"event_id": "scheduled-0.500", "event": {"prompt": "sun"},
                   "transition_chunks": 0}),
            (1.0, {"event_id": "scheduled-1.000", "event": {"multi_modal_data": {
                "camera": {"mode": "target", "data": {}}}}}),
            (2.0, {"event_id": "scheduled-2.000", "transition_chunks": 3, "event": {
                "prompt": "rain",
                "multi_modal_data": {"camera": example.wasd_to_camera_payload("w")}}}),
        ]  # fmt: skip

    def test_updates_that_disagree_or_lack_a_part_are_refused(self):
        with pytest.raises(ValueError, match="disagree about prompt"):
            example.scheduled_interactions([{"at": 1, "prompt": "a"}, {"at": 1, "prompt": "b"}], [])
        with pytest.raises(ValueError, match="needs prompt, actions or camera"):
            example.scheduled_interactions([], [{"at": 1}])
        for at in ({}, {"at": "1"}, {"at": True}, {"at": float("nan")}):
            with pytest.raises(ValueError, match='needs "at", a number of seconds'):
                example.scheduled_interactions([], [{"actions": ["w"], **at}])

    @pytest.mark.parametrize("text", ["[", '{"at": 1}', '["at"]'])
    def test_updates_that_are_no_list_of_objects_are_bad_flags(self, text: str):
        with pytest.raises(SystemExit) as caught:
            example.parse_args(["--camera-updates", text])
        assert caught.value.code == 2


def test_keys_are_held_while_they_repeat():
    keys = example.HeldKeys()
    keys.press("W", 0.0)
    keys.press("l", 0.3)
    keys.press("x", 0.3)
    assert keys.held(0.5) == {"w", "l"}
    assert keys.held(0.7) == {"l"}
    keys.press("w", 0.8)
    keys.press(" ", 0.8)
    assert keys.held(0.8) == frozenset()


def video() -> list[bytes]:
    encoder = ChunkEncoder(64, 48, 16)
    rng = np.random.default_rng(0)
    return [
        encoder.encode(rng.integers(0, 255, (frames, 48, 64, 3), dtype=np.uint8))
        for frames in (9, 12)
    ]


def test_a_frame_is_drawn_with_two_pixels_for_each_character():
    frame = np.zeros((4, 6, 3), np.uint8)
    frame[0, 0], frame[1, 0] = (1, 2, 3), (4, 5, 6)
    lines = drawn(frame, 80, 24).split("\n")
    assert [line.count("\u2580") for line in lines] == [6, 6]
    assert lines[0].startswith("\x1b[38;2;1;2;3;48;2;4;5;6m\u2580")
    half = drawn(np.zeros((64, 96, 3), np.uint8), 48, 100).split("\n")
    assert (len(half), half[0].count("\u2580")) == (16, 48)


async def whole(peer: Peer) -> None:
    await peer.video_start()
    for index, payload in enumerate(video()):
        await peer.chunk(index, (9, 12)[index], payload)
    await peer.done()


class TestRun:
    async def test_the_saved_file_holds_every_frame(self, tmp_path):
        path = tmp_path / "v.mp4"
        async with scripted_server(whole) as server:
            rc = await asyncio.create_subprocess_exec(
                sys.executable, example.__file__, "--port", str(server.port), "--output", str(path),
                "--image-reference", IMAGE, "--num-frames", "21", "--width", "64", "--height", "48",
                "--show", stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            shown, _ = await asyncio.wait_for(rc.communicate(), 60)
            assert rc.returncode == 0
        assert "chunk 1: 12 frames" in shown.decode()
        assert "\u2580" in shown.decode()
        assert server.peers[0].start["num_frames"] == 21
        with av.open(io.BytesIO(path.read_bytes())) as container:
            assert len(list(container.decode(video=0))) == 21

    async def test_scheduled_updates_are_sent_after_the_start(self):
        async def script(peer: Peer):
            await asyncio.sleep(0.1)
            assert peer.received == []
            await peer.video_start()
            await peer.until("session.interaction")
            await peer.done()

        async with scripted_server(script) as server:
            args = example.parse_args([
                "--port", str(server.port), "--image-reference", IMAGE,
                "--camera-updates", '[{"at": 0.05, "actions": ["w"]}]',
            ])  # fmt: skip
            client = await asyncio.wait_for(example.run(args, -1), 30)
        assert client.done is not None
        assert client.error is None
        assert server.peers[0].received[0]["interaction"]["event_id"] == "scheduled-0.050"

    async def test_a_base_url_and_a_key(self):
        async with scripted_server(whole) as server:
            args = example.parse_args([
                "--base-url", f"http://127.0.0.1:{server.port}/proxy/", "--api-key", "secret",
                "--image-reference", IMAGE,
            ])  # fmt: skip
            client = await asyncio.wait_for(example.run(args, -1), 30)
        assert client.done is not None
        request = server.peers[0].socket.request
        assert request.headers["Authorization"] == "Bearer secret"
        assert request.path == "/proxy/v1/realtime/video"

    async def test_no_key_is_no_header(self):
        async with scripted_server(whole) as server:
            argv = ["--port", str(server.port), "--image-reference", IMAGE]
            await asyncio.wait_for(example.run(example.parse_args(argv), -1), 30)
        assert "Authorization" not in server.peers[0].socket.request.headers

    async def test_a_fault_of_the_steering_is_raised_after_the_video_is_saved(
        self, tmp_path, monkeypatch
    ):
        path = tmp_path / "v.mp4"
        pipe, other_end = os.pipe()  # has no terminal's settings
        try:
            async with scripted_server(whole) as server:
                args = example.parse_args(["--port", str(server.port), "--image-reference", IMAGE])
                args.live = True
                client = await asyncio.wait_for(example.run(args, pipe), 30)
        finally:
            os.close(pipe)
            os.close(other_end)
        assert isinstance(client.fault, termios.error)

        async def played(*_: object) -> example.Client:
            return client

        monkeypatch.setattr(example, "run", played)
        with pytest.raises(termios.error):
            await asyncio.to_thread(example.main, ["--output", str(path)])
        assert path.stat().st_size > 0

    async def test_interrupt_stops_the_world(self):
        async def script(peer: Peer):
            await peer.video_start()
            os.kill(os.getpid(), signal.SIGINT)
            await peer.until("session.stop")
            await peer.done(stopped=True)

        async with scripted_server(script) as server:
            args = example.parse_args(["--port", str(server.port), "--image-reference", IMAGE])
            client = await asyncio.wait_for(example.run(args, -1), 30)
        assert client.done.stopped

    async def test_a_terminal_steers(self, capsys):
        keyboard, terminal = pty.openpty()

        async def script(peer: Peer):
            await peer.video_start()
            await asyncio.sleep(0.1)
            os.write(keyboard, b"wl")
            await peer.until("session.interaction")
            while len(peer.received) < 2:  # the release, 0.6 s later
                await asyncio.sleep(0.02)
            os.write(keyboard, b"q")
            await peer.until("session.stop")
            await peer.done(stopped=True)

        try:
            before = termios.tcgetattr(terminal)
            async with scripted_server(script) as server:
                args = example.parse_args(["--port", str(server.port), "--unbounded"])
                args.live = True
                await asyncio.wait_for(example.run(args, terminal), 30)
            assert termios.tcgetattr(terminal) == before
        finally:
            os.close(keyboard)
            os.close(terminal)
        assert "q ends the world" in capsys.readouterr().out
        pressed, released, stop = server.peers[0].received
        held = json.loads(json.dumps(example.wasd_to_camera_payload("wl")))
        assert pressed["interaction"] == {
            "event_id": "live-1", "event": {"multi_modal_data": {"camera": held}},
        }  # fmt: skip
        still = released["interaction"]["event"]["multi_modal_data"]["camera"]["data"]
        assert still == {"translation": [0, 0, 0], "rotation": [0, 0, 0, 1]}
        assert stop == {"type": "session.stop"}

    async def test_an_error_ends_without_a_video(self):
        async def script(peer: Peer):
            await peer.video_start()
            await peer.tell("error", message="image_reference: is not a picture")

        async with scripted_server(script) as server:
            argv = ["--port", str(server.port), "--image-reference", IMAGE]
            client = await example.run(example.parse_args(argv), -1)
        assert (client.done, client.video) == (None, b"")
        assert client.error == "image_reference: is not a picture"

    def test_no_server_and_no_terminal(self, capsys):
        assert example.main(["--port", "1"]) == 1
        assert "error:" in capsys.readouterr().err
        with pytest.raises(SystemExit) as caught:
            example.parse_args(["--live"])
        assert caught.value.code == 2
