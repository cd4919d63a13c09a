"""The interactions of one socket: checked, kept until its session is open, submitted in order."""

from collections import deque

from vllm_omni.entrypoints.server.channel import SocketChannel
from vllm_omni.entrypoints.server.protocol import SessionInteraction, SessionInteractionQueued
from vllm_omni.entrypoints.server.state import ServerState
from vllm_omni.errors import InvalidRequestError, OmniError
from vllm_omni.inputs.interaction import ControlEvent

MAX_EARLY = 64
"""Events that may come before the session is open."""


class Steering:
    """Answers every interaction once, with ``queued`` or with an error."""

    def __init__(self, channel: SocketChannel, state: ServerState, request_id: str) -> None:
        self._channel = channel
        self._state = state
        self._engine = state.client.engine
        self._request_id = request_id
        self._session_id: str | None = None
        self._early: deque[ControlEvent] = deque()

    async def begin(self, session_id: str) -> None:
        """Submit what was kept, in order; what comes meanwhile waits behind it."""
        while self._early:
            await self._submit(session_id, self._early[0])
            self._early.popleft()
        self._session_id = session_id

    async def take(self, message: SessionInteraction) -> None:
        """Submit an interaction, or keep it while the session's picture is on its way."""
        event_id = message.interaction.event_id
        try:
            event = await self._state.control_event(message.interaction)
            event_id = event.event_id
            if self._session_id is None:
                self._keep(event)
                return
        except OmniError as error:
            await self._channel.send_error(error, request_id=self._request_id, event_id=event_id)
            return
        await self._submit(self._session_id, event)

    def _keep(self, event: ControlEvent) -> None:
        if len(self._early) == MAX_EARLY:
            raise InvalidRequestError(
                f"the session is being prepared and {MAX_EARLY} events wait for it; try again in "
                "a moment"
            )
        self._early.append(event)

    async def _submit(self, session_id: str, event: ControlEvent) -> None:
        event_id = event.event_id
        try:
            self._engine.submit(session_id, event)
        except OmniError as error:
            await self._channel.send_error(error, request_id=self._request_id, event_id=event_id)
            return
        queued = SessionInteractionQueued(request_id=self._request_id, event_id=event_id)
        await self._channel.send(queued)
