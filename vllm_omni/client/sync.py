"""The client for programs without an event loop: each call waits for its end."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from vllm_omni.client.camera import Pose
from vllm_omni.client.errors import ConnectionLostError
from vllm_omni.client.world import LOCAL_SERVER, Chunk, WorldClient
from vllm_omni.entrypoints.server.protocol import Capabilities, SessionDone, VideoStart

Result = TypeVar("Result")


class SyncWorldClient:
    """:class:`WorldClient` with its event loop in a thread of its own.

    What it has is named as in :class:`WorldClient` and raises the same errors; a ``for`` loop
    gives chunks.
    The thread runs inside ``with`` alone: a call outside raises :class:`ConnectionLostError`, but
    for :meth:`wait_ready`, which needs no connection, and :meth:`save`.
    """

    def __init__(
        self,
        address: str = LOCAL_SERVER,
        *,
        api_key: str | None = None,
        decode: bool = False,
        keep_video: bool = True,
    ) -> None:
        self._client = WorldClient(address, api_key=api_key, decode=decode, keep_video=keep_video)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "SyncWorldClient":
        """Connect to the server as ``WorldClient.connect`` does."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="world client", daemon=True
        )
        self._thread.start()
        try:
            self._wait(self._client.connect())
        except BaseException:
            self._end_loop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection, which ends a world that still runs."""
        try:
            self._wait(self._client.close())
        finally:
            self._end_loop()

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks until the world ends."""
        while True:
            try:
                chunk = self._wait(self._client.__anext__())
            except StopAsyncIteration:
                return
            yield chunk

    @property
    def position(self) -> int | None:
        """Place in the waiting line, ``None`` outside of it."""
        return self._client.position

    @property
    def done(self) -> SessionDone | None:
        """How the world ended, once it has."""
        return self._client.done

    def wait_ready(self, patience_s: float | int = 600.0) -> None:
        """Wait before ``with`` as ``WorldClient.wait_ready`` does."""
        # The caller's thread may run a loop of its own, as that of a notebook does.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, self._client.wait_ready(patience_s)).result()

    def capabilities(self) -> Capabilities:
        """What the server can do: its size, its chunks, its rate."""
        return self._wait(self._client.capabilities())

    def start(
        self,
        image: str | Path | bytes,
        prompt: str,
        *,
        on_position: Callable[[int], None] | None = None,
        **fields: object,
    ) -> VideoStart:
        """Open a world as ``WorldClient.start`` does."""
        arguments: dict[str, object] = {"on_position": on_position, **fields}
        return self._wait(self._client.start(image, prompt, **arguments))  # pyright: ignore[reportArgumentType]

    def steer(
        self,
        keys: Iterable[str] | None = None,
        *,
        velocity: Pose | None = None,
        target: Pose | None = None,
    ) -> str:
        """Move the camera as ``WorldClient.steer`` does."""
        return self._wait(self._client.steer(keys, velocity=velocity, target=target))

    def prompt(self, text: str, *, blend: int | None = None) -> str:
        """Change the prompt as ``WorldClient.prompt`` does."""
        return self._wait(self._client.prompt(text, blend=blend))

    def reset(
        self,
        *,
        prompt: str | None = None,
        image: str | Path | bytes | None = None,
        seed: int | None = None,
    ) -> None:
        """Begin the world anew as ``WorldClient.reset`` does."""
        self._wait(self._client.reset(prompt=prompt, image=image, seed=seed))

    def stop(self) -> None:
        """End the world after the chunk that is being made."""
        self._wait(self._client.stop())

    def save(self, path: str | Path, *, fps: float | int | None = None) -> None:
        """Write what was received as an MP4 that every player opens."""
        self._client.save(path, fps=fps)

    def _wait(self, call: Coroutine[object, object, Result]) -> Result:
        if self._loop is None:
            call.close()
            raise ConnectionLostError(
                "no connection outside `with`: use `with SyncWorldClient(...) as world:`"
            )
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def _end_loop(self) -> None:
        loop, self._loop = self._loop, None
        assert loop is not None, "begins in `__enter__`"
        assert self._thread is not None, "begins in `__enter__`"
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()
