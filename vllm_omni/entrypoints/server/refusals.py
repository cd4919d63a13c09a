"""Requests that are turned away before they are sessions: counted by reason, and in the log."""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.entrypoints.server.http_errors import INTERNAL_ERROR, status_of
from vllm_omni.errors import OmniError, OutOfKVMemoryError, ServerFullError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)


def count_refusal(metrics: EngineMetrics, request_id: str, error: OmniError) -> None:
    """Count one refused request."""
    reason = "invalid_request" if status_of(error) < INTERNAL_ERROR else "unavailable"
    if isinstance(error, ServerFullError):
        reason = "server_full"
    elif isinstance(error, OutOfKVMemoryError):
        reason = "out_of_memory"
    metrics.refused(reason)
    logger.info("%s refused: %s", request_id, error)


@contextmanager
def refusals_counted(metrics: EngineMetrics, request_id: str) -> Iterator[None]:
    """Count every error that leaves the block as a refusal of the request."""
    try:
        yield
    except OmniError as error:
        count_refusal(metrics, request_id, error)
        raise
