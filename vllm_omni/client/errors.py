"""What can go wrong for a client, by what it can do about it.

WorldError
├── CannotConnectError      no server there, or it denies the connection (loading, full, ending)
│   └── KeyRefusedError     it wants a key, another key, or another page
├── ConnectionLostError     the connection ended before the world did
├── ProtocolError           what came is not this protocol
└── WorldRefusedError       the server says why this world cannot be, or cannot go on
    └── EventRefusedError   one event was refused; the world goes on
"""

from vllm_omni.errors import OmniError


class WorldError(OmniError):
    """Anything that keeps a client from its world."""


class CannotConnectError(WorldError):
    """No connection could be opened; trying again later may help.

    Attributes:
        status: HTTP status of the server that denied it, ``None`` if no server answered.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class KeyRefusedError(CannotConnectError):
    """The server wants an API key, or another one than it got."""


class ConnectionLostError(WorldError):
    """The connection ended before the world did. The world is gone: start a new one."""


class ProtocolError(WorldError):
    """The other side sent something that this protocol does not have."""


class WorldRefusedError(WorldError):
    """The server's own words on why a world could not be made, or had to end.

    Attributes:
        code: ``server_full``, ``invalid_request`` and so on, ``None`` where the server gave none.
    """

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class EventRefusedError(WorldRefusedError):
    """One control message was refused; the world goes on, and reading it may go on too.

    Attributes:
        event_id: the event, where the server names it.
    """

    def __init__(
        self, message: str, *, code: str | None = None, event_id: str | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.event_id = event_id
