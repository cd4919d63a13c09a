"""Opens a world on a running server, steers it, and saves what was seen as an MP4.

    python streaming_video_client.py --port 8000 --prompt "A quiet harbour." \
        --image-reference harbour.png --live --show

With ``--live`` the keys w a s d move, i j k l look, space stands still and q ends. A terminal
reports no key releases: a key counts as held until it has not repeated for 0.6 s. Ctrl-C ends the
world as q does; a second one leaves at once. ``--show`` plays the video in the terminal. Exit
codes: 0 saved, 1 failed, 2 bad flags.
"""

import argparse
import asyncio
import json
import math
import signal
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from examples.online_serving.streaming_video_generation.camera_keys import (
    HeldKeys,
    typed_keys,
    wasd_to_camera_payload,
)
from examples.online_serving.streaming_video_generation.terminal_picture import TerminalPicture
from vllm_omni.client import (
    Chunk,
    ConnectionLostError,
    EventRefusedError,
    WorldClient,
    WorldError,
)
from vllm_omni.client.address import image_url, socket_url
from vllm_omni.client.camera import KEY_HELP
from vllm_omni.diffusion.utils.media_utils import finalize_streaming_video_bytes
from vllm_omni.entrypoints.server import protocol

POLL_INTERVAL_S = 0.05


# ------------------------------------------------------------------ what to send


def endpoint_url(args: argparse.Namespace) -> str:
    """Address of the socket: of the base URL, or of host and port.

    Raises:
        ValueError: the base URL has another scheme.
    """
    base = args.base_url or f"ws://{args.host}:{args.port}"
    if "://" not in base:
        raise ValueError(f"--base-url must start with http, https, ws or wss ://, got {base!r}")
    try:
        return socket_url(base)
    except ValueError as error:
        raise ValueError(f"--base-url: {error}") from None


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


@dataclass
class Client:
    """One world as it is played.

    Attributes:
        error: what the server said last was wrong.
        fault: what broke on this side beside the reading of the video.
        video: all payloads in order: a fragmented MP4.
        done: how the server ended the session.
    """

    world: WorldClient
    error: str | None = None
    fault: Exception | None = None
    picture: TerminalPicture | None = None

    @property
    def video(self) -> bytes:
        """All payloads in order: a fragmented MP4."""
        return self.world.video

    @property
    def done(self) -> protocol.SessionDone | None:
        """How the server ended the session."""
        return self.world.done

    async def read(self) -> None:
        """Read until the world ends; what the server refuses is printed and noted."""
        while self.done is None:
            try:
                async for chunk in self.world:
                    self._show(chunk)
                    await asyncio.sleep(0)  # the picture gets its turn, however fast chunks come
            except EventRefusedError as refused:
                self._note(refused)

    def _show(self, chunk: Chunk) -> None:
        events = f", started {', '.join(chunk.started)}" if chunk.started else ""
        if self.picture is not None and chunk.frames is not None:
            self.picture.add(chunk.frames)
        line = f"chunk {chunk.index}: {chunk.num_frames} frames, {len(chunk.data)} bytes{events}"
        print(f"{line}\x1b[K" if self.picture is not None else line)

    def _note(self, error: WorldError) -> None:
        self.error = str(error)
        print(f"error: {error}", file=sys.stderr)

    async def play(self, message: protocol.SessionStart, side: Sequence[Awaitable[None]]) -> None:
        """Open the world, and do ``side`` beside the reading."""
        tasks: list[asyncio.Future[None]] = []
        try:
            start = await self.world.open(
                message.model_dump(mode="json", exclude_none=True),
                on_position=lambda place: print(f"waiting in line, position {place}"),
            )
            print(f"started {start.request_id}")
            tasks = [asyncio.ensure_future(one) for one in side]
            await asyncio.sleep(0)  # all of them begin, however soon the world ends
            await self.read()
        except WorldError as error:
            self._note(error)
        finally:
            for task in tasks:
                task.cancel()
            self.fault = _first_fault(await asyncio.gather(*tasks, return_exceptions=True))

    async def follow(self, schedule: Sequence[tuple[float, protocol.SessionInteraction]]) -> None:
        """Send scheduled interactions at their seconds after the start."""
        began = time.monotonic()
        for at, interaction in schedule:
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            await self.world.send(interaction.model_dump(mode="json", exclude_none=True))

    async def steer(self, descriptor: int) -> None:
        """Send the keys held on a terminal whenever they change, until q ends the world."""
        print(f"keys: {KEY_HELP}")
        keys, sent, events = HeldKeys(), frozenset[str](), 0
        with typed_keys(descriptor) as typed:
            text = ""
            while "q" not in text:
                for key in text:
                    keys.press(key, time.monotonic())
                held = keys.held(time.monotonic())
                if held != sent:
                    events += 1
                    event = {"multi_modal_data": {"camera": wasd_to_camera_payload(held)}}
                    await self.world.interact(event, event_id=f"live-{events}")
                    sent = held
                await asyncio.sleep(POLL_INTERVAL_S)
                text = "".join(typed.get_nowait() for _ in range(typed.qsize()))
            await self.world.stop()


async def run(args: argparse.Namespace, keyboard: int) -> Client:
    """Play one world; returns when it has ended.

    Raises:
        ValueError: a flag that makes no sense.
        CannotConnectError: no server, or it denies the connection.
    """
    message = start_message(args)
    schedule = scheduled_interactions(args.prompt_updates, args.camera_updates)
    async with WorldClient(endpoint_url(args), api_key=args.api_key, decode=args.show) as world:
        client = Client(world, picture=TerminalPicture(args.fps) if args.show else None)
        loop = asyncio.get_running_loop()
        stopping: list[asyncio.Task[None]] = []

        def interrupt() -> None:
            loop.remove_signal_handler(signal.SIGINT)  # the next Ctrl-C leaves at once
            stopping.append(asyncio.create_task(world.stop()))

        loop.add_signal_handler(signal.SIGINT, interrupt)
        side = [client.follow(schedule)]
        side += [client.steer(keyboard)] if args.live else []
        side += [] if client.picture is None else [client.picture.play()]
        try:
            await client.play(message, side)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            await asyncio.gather(*stopping, return_exceptions=True)
        return client


def _first_fault(ended: Sequence[object]) -> Exception | None:
    """The first failure of this side; a cancellation is no ``Exception``."""
    faults = (result for result in ended if isinstance(result, Exception))
    return next((fault for fault in faults if not isinstance(fault, ConnectionLostError)), None)


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
    add("--width", type=int, help="with --height; without both the server's own size")
    add("--height", type=int)
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
    add("--live", action="store_true", help=f"steer with the keyboard: {KEY_HELP}")
    add("--show", action="store_true", help="play the video in this terminal")
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
    except (OSError, ValueError, WorldError) as error:
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
