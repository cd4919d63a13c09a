"""The client for programs without an event loop: each call waits for its end."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from vllm_omni.client.errors import ConnectionLostError
from vllm_omni.client.world import LOCAL_SERVER, Chunk, WorldClient
from vllm_omni.entrypoints.server.protocol import SessionDone

Given = ParamSpec("Given")
Result = TypeVar("Result")


def _waited(
    call: Callable[Concatenate[WorldClient, Given], Coroutine[object, object, Result]],
) -> Callable[Concatenate["SyncWorldClient", Given], Result]:
    """A call of the client as a method that waits for its end."""

    @wraps(call)
    def wait(world: "SyncWorldClient", *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return world._wait(call(world._client, *args, **kwargs))  # noqa: SLF001

    return wait


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

    capabilities = _waited(WorldClient.capabilities)
    """What the server can do: its size, its chunks, its rate."""
    start = _waited(WorldClient.start)
    """Open a world as ``WorldClient.start`` does."""
    steer = _waited(WorldClient.steer)
    """Move the camera as ``WorldClient.steer`` does."""
    prompt = _waited(WorldClient.prompt)
    """Change the prompt as ``WorldClient.prompt`` does."""
    reset = _waited(WorldClient.reset)
    """Begin the world anew as ``WorldClient.reset`` does."""
    stop = _waited(WorldClient.stop)
    """End the world after the chunk that is being made."""

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
