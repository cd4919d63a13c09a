"""Requests that end before they are sessions: counted by reason, and in the log."""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.session import StopCause
from vllm_omni.entrypoints.server.channel import ClientGoneError
from vllm_omni.entrypoints.server.http_errors import INTERNAL_ERROR, ClientLeftError, status_of
from vllm_omni.entrypoints.server.state import ServerState
from vllm_omni.errors import OmniError, OutOfKVMemoryError, ServerFullError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)


def count_refusal(metrics: EngineMetrics, request_id: str, error: OmniError) -> None:
    """Count and log a request that was refused before it became a session."""
    reason = "invalid_request" if status_of(error) < INTERNAL_ERROR else "unavailable"
    if isinstance(error, ServerFullError):
        reason = "server_full"
    elif isinstance(error, OutOfKVMemoryError):
        reason = "out_of_memory"
    metrics.refused(reason)
    logger.info("%s refused: %s", request_id, error)


def refusal_of_handshake(state: ServerState) -> OmniError | None:
    """Why a socket is not even opened, if it is not; that is counted and logged.

    An answer with status 503 instead of the handshake lets a proxy try another server. Without
    ``--drain-timeout`` and ``--refuse-when-full`` every socket opens and hears what is wrong.
    """
    config = state.config
    if not (config.refuse_when_full or config.drain_timeout_s):
        return None
    engine = state.client.engine
    try:
        engine.check_admits()
    except OmniError as error:
        if isinstance(error, ServerFullError) and not config.refuse_when_full:
            return None
        count_refusal(engine.metrics, "a handshake", error)
        return error
    return None


@contextmanager
def refusals_counted(metrics: EngineMetrics, request_id: str) -> Iterator[None]:
    """Count whatever leaves the block, once: refusals, clients that left, and what broke.

    A socket that was closed before it asked for anything is not counted.
    """
    try:
        yield
    except ClientGoneError:
        raise
    except ClientLeftError as error:
        metrics.stopped(StopCause.DISCONNECTED)
        logger.info("%s ended: %s", request_id, error)
        raise
    except OmniError as error:
        count_refusal(metrics, request_id, error)
        raise
    except Exception as error:
        # Raised again: whoever answers the client has the traceback written.
        metrics.stopped(StopCause.FAULT)
        fault = type(error).__name__
        logger.warning("%s broke before it was a session: %s", request_id, fault)
        raise
