"""Opens a world on a running server, steers it, and saves what was seen as an MP4.

    python streaming_video_client.py --port 8000 --prompt "A quiet harbour." \
        --image-reference harbour.png --width 832 --height 480 --live

With ``--live`` the keys w a s d move, i j k l look, space stands still and q ends. A terminal
reports no key releases: a key counts as held until it has not repeated for 0.6 s. Ctrl-C ends the
world as q does; a second one leaves at once. Exit codes: 0 saved, 1 failed, 2 bad flags.
"""

import argparse
import asyncio
import base64
import json
import math
import mimetypes
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from examples.online_serving.streaming_video_generation.camera_keys import (
    HeldKeys,
    typed_keys,
    wasd_to_camera_payload,
)
from vllm_omni.diffusion.utils.media_utils import finalize_streaming_video_bytes
from vllm_omni.entrypoints.server import protocol

ENDPOINT_PATH = "/v1/realtime/video"
PING_INTERVAL_S = 20.0
POLL_INTERVAL_S = 0.05


# ------------------------------------------------------------------ what to send


def endpoint_url(args: argparse.Namespace) -> str:
    """Address of the socket: of the base URL, or of host and port.

    Raises:
        ValueError: the base URL has another scheme.
    """
    base = args.base_url or f"ws://{args.host}:{args.port}"
    scheme, _, rest = base.partition("://")
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if scheme not in schemes or not rest:
        raise ValueError(f"--base-url must start with http, https, ws or wss ://, got {base!r}")
    return f"{schemes[scheme]}://{rest.rstrip('/').removesuffix(ENDPOINT_PATH)}{ENDPOINT_PATH}"


def start_message(args: argparse.Namespace) -> protocol.SessionStart:
    """The start message of the command line.

    Raises:
        InvalidRequestError: names the flag's field that is wrong.
    """
    same_name = ("model", "prompt", "width", "height", "size", "seconds", "fps", "num_frames",
                 "negative_prompt", "num_inference_steps", "guidance_scale", "guidance_scale_2",
                 "boundary_ratio", "flow_shift", "true_cfg_scale", "seed")  # fmt: skip
    values: dict[str, object] = {name: vars(args)[name] for name in same_name}
    if args.unbounded:
        values |= {"num_frames": None, "seconds": None, "unbounded": True}
    if args.image_reference is not None:
        values["image_reference"] = {"image_url": image_url(args.image_reference)}
    if args.extra_params is not None:
        values["extra_params"] = args.extra_params
    given = {name: value for name, value in values.items() if value is not None}
    return protocol.parse_start(json.dumps({"type": "session.start", **given}))


def image_url(reference: str) -> str:
    """A URL as it is; a file as ``data:`` URL."""
    if reference.startswith(("http://", "https://", "data:")):
        return reference
    kind = mimetypes.guess_type(reference)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(Path(reference).read_bytes()).decode()}"


def scheduled_interactions(
    prompt_updates: Sequence[dict], camera_updates: Sequence[dict]
) -> list[tuple[float, protocol.SessionInteraction]]:
    """Interactions and the seconds after the start at which to send them, in order.

    Updates of the same time become one interaction.

    Raises:
        ValueError: an update lacks what it needs, or two of the same time disagree.
    """
    by_time: dict[float, dict[str, object]] = {}
    for update in [*prompt_updates, *camera_updates]:
        fields = by_time.setdefault(_seconds(update), {})
        for name, value in _interaction_fields(update).items():
            if fields.setdefault(name, value) != value:
                raise ValueError(f"two updates at {update['at']} s disagree about {name}")
    return [(at, _interaction(f"scheduled-{at:.3f}", by_time[at])) for at in sorted(by_time)]


def _seconds(update: dict) -> float:
    if type(at := update.get("at")) not in {int, float} or not math.isfinite(at):
        raise ValueError(f'an update needs "at", a number of seconds, got {update}')
    return float(at)


def _interaction_fields(update: dict) -> dict[str, object]:
    if "prompt" in update:
        return {
            "prompt": update["prompt"],
            "transition_chunks": update.get("transition_chunks", 3),
        }
    if "actions" in update:
        camera = wasd_to_camera_payload(update["actions"])
    elif "camera" in update:
        camera = update["camera"]
    else:
        raise ValueError(f"an update needs prompt, actions or camera, got {update}")
    given = {key: update[key] for key in update.keys() & {"transition_chunks"}}
    return {"camera": camera, **given}


def _interaction(event_id: str, fields: dict[str, object]) -> protocol.SessionInteraction:
    event = {"prompt": fields.get("prompt")}
    if "camera" in fields:
        event["multi_modal_data"] = {"camera": fields["camera"]}
    interaction = {
        "event_id": event_id, "event": event, "transition_chunks": fields.get("transition_chunks"),
    }  # fmt: skip
    message = {"type": "session.interaction", "interaction": interaction}
    parsed = protocol.parse_control(json.dumps(message))
    if not isinstance(parsed, protocol.SessionInteraction):
        raise TypeError(f"not an interaction: {parsed}")
    return parsed


# ------------------------------------------------------------------ the session


class Client:
    """One world over one socket: reads video, sends what the viewer does.

    Attributes:
        error: what the server said last was wrong.
        fault: what broke on this side beside the reading of the video.
        done: how the server ended the session.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._started = asyncio.Event()
        self._payloads: list[bytes] = []
        self._events = 0
        self.error: str | None = None
        self.fault: Exception | None = None
        self.done: protocol.SessionDone | None = None

    @property
    def video(self) -> bytes:
        """All payloads in order: a fragmented MP4."""
        return b"".join(self._payloads)

    async def send(self, message: protocol.SessionStart | protocol.ControlMessage) -> None:
        """Send one message."""
        await self._socket.send(message.model_dump_json(exclude_none=True))

    async def read(self) -> None:
        """Read until the server closes the socket."""
        async for received in self._socket:
            if isinstance(received, bytes):
                self._payloads.append(received)
            else:
                self._handle(protocol.parse_server(received))

    def _handle(self, message: protocol.ServerMessage) -> None:
        match message:
            case protocol.SessionQueued():
                print(f"waiting in line, position {message.position}")
            case protocol.VideoStart():
                print(f"started {message.request_id}")
                self._started.set()
            case protocol.VideoChunkMetadata():
                events = ", ".join(message.started_event_ids)
                print(
                    f"chunk {message.generation_chunk_index}: {message.num_frames} frames, "
                    f"{message.byte_length} bytes" + (f", started {events}" if events else "")
                )
            case protocol.ErrorMessage():
                self.error = message.message
                print(f"error: {message.message}", file=sys.stderr)
            case protocol.SessionDone():
                self.done = message

    async def ping(self) -> None:
        """Keep the session alive."""
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            await self.send(protocol.SessionPing())

    async def follow(self, schedule: Sequence[tuple[float, protocol.SessionInteraction]]) -> None:
        """Send scheduled interactions at their seconds after the start."""
        await self._started.wait()
        began = time.monotonic()
        for at, interaction in schedule:
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            await self.send(interaction)

    async def steer(self, descriptor: int) -> None:
        """Send the keys held on a terminal whenever they change, until q ends the world."""
        await self._started.wait()
        keys, sent = HeldKeys(), frozenset[str]()
        with typed_keys(descriptor) as typed:
            text = ""
            while "q" not in text:
                for key in text:
                    keys.press(key, time.monotonic())
                sent = await self._send_keys(keys.held(time.monotonic()), sent)
                await asyncio.sleep(POLL_INTERVAL_S)
                text = "".join(typed.get_nowait() for _ in range(typed.qsize()))
            await self.send(protocol.SessionStop())

    async def _send_keys(self, held: frozenset[str], sent: frozenset[str]) -> frozenset[str]:
        if held != sent:
            self._events += 1
            camera = wasd_to_camera_payload(held)
            await self.send(_interaction(f"live-{self._events}", {"camera": camera}))
        return held


async def run(args: argparse.Namespace, keyboard: int) -> Client:
    """Play one world; returns when the server has closed the socket.

    Raises:
        ValueError: a flag that makes no sense.
        OSError: no server.
    """
    message = start_message(args)
    schedule = scheduled_interactions(args.prompt_updates, args.camera_updates)
    headers = {} if args.api_key is None else {"Authorization": f"Bearer {args.api_key}"}
    async with connect(
        endpoint_url(args), max_size=None, ping_interval=None, additional_headers=headers
    ) as socket:
        client = Client(socket)
        loop = asyncio.get_running_loop()
        stopping: list[asyncio.Task[None]] = []

        def interrupt() -> None:
            loop.remove_signal_handler(signal.SIGINT)  # the next Ctrl-C leaves at once
            stopping.append(asyncio.create_task(client.send(protocol.SessionStop())))

        loop.add_signal_handler(signal.SIGINT, interrupt)
        await client.send(message)
        side = [asyncio.create_task(client.ping()), asyncio.create_task(client.follow(schedule))]
        if args.live:
            side.append(asyncio.create_task(client.steer(keyboard)))
        try:
            await client.read()
        except ConnectionClosed as error:
            client.error = client.error or f"the connection was lost: {error}"
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            for task in [*side, *stopping]:
                task.cancel()
            ended = await asyncio.gather(*side, *stopping, return_exceptions=True)
        client.fault = _first_fault(ended)
        return client


def _first_fault(ended: Sequence[object]) -> Exception | None:
    """The first result that is a failure of this side; a cancellation is no ``Exception``."""
    faults = (result for result in ended if isinstance(result, Exception))
    return next((fault for fault in faults if not isinstance(fault, ConnectionClosed)), None)


# ------------------------------------------------------------------ command line


def json_list(text: str) -> list[dict]:
    """The updates of a flag."""
    updates = json.loads(text)
    if isinstance(updates, list) and all(isinstance(update, dict) for update in updates):
        return updates
    raise argparse.ArgumentTypeError("needs a JSON list of objects")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags of the command line."""
    parser = argparse.ArgumentParser(description="Client of live worlds.")
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--base-url", help="http(s) or ws(s) address instead of host and port")
    add("--api-key", help="key of the server, where it needs one")
    add("--model", help="served name (default: whatever is served)")
    add("--prompt", default="A quiet scene, seen by a slowly moving camera.")
    add("--output", type=Path, default=Path("streaming_video_output.mp4"))
    add("--width", type=int, default=640)
    add("--height", type=int, default=384)
    add("--size", help="WxH instead of width and height")
    add("--seconds", help="length instead of --num-frames")
    add("--fps", type=float, default=16)
    add("--num-frames", type=int, help="9 + 12k (default 429)")
    add("--unbounded", action="store_true", help="until stopped (default with --live)")
    add("--image-reference", help="first picture: path or URL")
    add("--seed", type=int)
    add("--flow-shift", type=float)
    add("--num-inference-steps", type=int)
    add("--extra-params", type=json.loads, help="JSON object of model options")
    add("--prompt-updates", type=json_list, default=[],
        help='JSON [{"at": seconds, "prompt": text, "transition_chunks": 3}]')  # fmt: skip
    add("--camera-updates", type=json_list, default=[],
        help='JSON [{"at": seconds, "actions": [keys]}], or "camera": {mode, data}')  # fmt: skip
    add("--live", action="store_true", help="steer with the keyboard of this terminal")
    add("--negative-prompt", help="no effect on this model, as are the flags below")
    add("--guidance-scale", type=float, default=1.0)
    for name in ("--guidance-scale-2", "--boundary-ratio", "--true-cfg-scale"):
        add(name, type=float)
    add("--helios-distilled-preset", action=argparse.BooleanOptionalAction)
    args = parser.parse_args(argv)
    if args.live and not sys.stdin.isatty():
        parser.error("--live needs a terminal as standard input")
    if args.num_frames is None and args.seconds is None:
        args.unbounded = args.unbounded or args.live
        args.num_frames = 429
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the client of the command line."""
    args = parse_args(argv)
    try:
        client = asyncio.run(run(args, sys.stdin.fileno() if args.live else -1))
    except (OSError, ValueError, InvalidHandshake, InvalidURI) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if client.video:
        # What arrived before a failure is kept too.
        args.output.write_bytes(
            finalize_streaming_video_bytes(client.video, input_format="m4s", fps=args.fps)
        )
        print(f"Saved {args.output}")
    if client.fault is not None:
        raise client.fault
    return 0 if client.done is not None and client.video else 1


if __name__ == "__main__":
    sys.exit(main())
