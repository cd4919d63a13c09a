"""Carries the events of one session from the engine's threads to an event loop."""

import asyncio

from vllm_omni.engine.session import SessionEvent


class EventQueue:
    """Made and read on one event loop; :meth:`put` is the engine's sink.

    It stays short: the engine pauses a session whose chunks nobody takes.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[SessionEvent] = asyncio.Queue()

    def put(self, event: SessionEvent) -> None:
        """Hand over one event, from any thread; without effect once the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            # The reader has gone with its loop, and must not take the engine with it.
            if not self._loop.is_closed():
                raise

    async def get(self) -> SessionEvent:
        """Wait for the next event and return it."""
        return await self._events.get()
