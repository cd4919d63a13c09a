"""Every error that leaves the package.

    OmniError
    ├── InvalidRequestError (ValueError)      a client's input; the session or connection goes on
    │   ├── EventConflictError                an event id was used twice
    │   └── InteractionError                  an interaction cannot be applied
    ├── ConfigError (ValueError)              deploy YAML, command line or keyword arguments
    │   ├── UnsupportedParallelismError (NotImplementedError)
    │   ├── ConfigTypeError (TypeError)       a setting of the wrong kind, or one that was removed
    │   └── ConfigNotFoundError (FileNotFoundError)
    ├── CheckpointError (ValueError)          files that are not the model they claim to be
    ├── OutOfKVMemoryError                    one more session does not fit
    ├── ServerFullError                       too many sessions are waiting
    ├── SessionClosedError                    the session has ended
    │   └── ServerDrainingError               the server ends and takes no new sessions
    ├── SessionFailedError                    a chunk raised; its session was closed
    ├── DeviceOutOfMemoryError                a chunk ran out of device memory
    ├── WorkerFailedError                     a worker died or failed; its group is relaunched
    ├── WorkerRestartedError                  the session's worker group was relaunched
    └── InternalError                         a bug of this package

``code`` is what a client sees in an ``error`` message; ``None`` means the message has no code.
A message says what was got, what was needed and which setting to change.
"""


class OmniError(Exception):
    """Base of all errors raised on purpose by this package."""

    code: str | None = None


class InvalidRequestError(OmniError, ValueError):
    """Input of a client that cannot be served.

    Args:
        message: what was got and what was needed.
        field: dotted name of the offending input, for example ``"extra_args.action_path"``.
    """

    code = "invalid_request"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message if field is None else f"{field}: {message}")
        self.field = field


OmniClientError = InvalidRequestError
"""The name that users of the public package import."""


class EventConflictError(InvalidRequestError):
    """An event id was used before in the same session."""

    code = "event_id_conflict"


class InteractionError(InvalidRequestError):
    """A well-formed interaction that this session cannot apply."""

    code = "interaction_failed"


class ConfigError(OmniError, ValueError):
    """A deploy file, command line or keyword argument that cannot be honoured."""


class UnsupportedParallelismError(ConfigError, NotImplementedError):
    """A combination of parallel degrees that this model does not run with."""


class ConfigTypeError(ConfigError, TypeError):
    """A setting of the wrong kind, or one that this version does not have."""


class ConfigNotFoundError(ConfigError, FileNotFoundError):
    """A configuration file that does not exist."""


class CheckpointError(OmniError, ValueError):
    """Checkpoint files that are missing, mis-shaped or of another model."""


class OutOfKVMemoryError(OmniError):
    """The KV window of one more session does not fit into the pool."""

    code = "out_of_memory"


class ServerFullError(OmniError):
    """No session slot is free and the waiting line is full."""

    code = "server_full"


class SessionClosedError(OmniError):
    """The session does not exist any more."""


class ServerDrainingError(SessionClosedError):
    """The server is about to end: it takes no new sessions, or it ended this one for that."""

    code = "server_draining"

    def __init__(self, message: str = "the server is shutting down") -> None:
        super().__init__(message)


class SessionFailedError(OmniError):
    """A chunk raised; its session was closed and everything it held was freed."""


class DeviceOutOfMemoryError(OmniError):
    """A chunk ran out of device memory; its session was closed and its memory freed."""

    code = "out_of_memory"


class WorkerFailedError(OmniError):
    """A worker process died, raised inside a collective, or outlasted its time limit."""


class WorkerRestartedError(OmniError):
    """The worker group of the session was relaunched; its state is lost."""

    code = "worker_restarted"


class InternalError(OmniError):
    """A bug of this package: one part of it asked another for something impossible.

    No input and no setting causes or mends it. A client gets no code; over HTTP it is status 500.
    """

    def __str__(self) -> str:
        return f"internal error: {super().__str__()}"
