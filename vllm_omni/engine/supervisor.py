"""Starts the worker group, warms it up, and makes a new one when it is lost."""

import threading
import time
from collections.abc import Callable

from vllm_omni.diffusion.executor.base import Executor
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import WorkerReady
from vllm_omni.engine.warmup import warm_up_plans, warm_up_request
from vllm_omni.errors import CheckpointError, ConfigError, OmniError, WorkerFailedError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

MAX_RESTARTS = 5
RESTART_WINDOW_S = 600.0
_FIRST_DELAY_S = 0.5


class WorkerSupervisor:
    """Owns the one executor that is alive. Used by one thread; any may call :meth:`shutdown`.

    Args:
        make_executor: makes a group that is not started; called once per generation.
        warm_up: size to warm up at before the group counts as ready; ``None`` for none.
        sleep: waits between restarts; by default until the time is over or the group is shut down.
    """

    def __init__(
        self,
        make_executor: Callable[[], Executor],
        *,
        warm_up: VideoGeometry | None,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._make_executor = make_executor
        self._warm_up = warm_up
        self._ended = threading.Event()
        self._sleep = sleep or self._ended.wait
        self._executor: Executor | None = None
        self._restarts_s: list[float] = []

    @property
    def executor(self) -> Executor:
        """The running group.

        Raises:
            WorkerFailedError: if there is none.
        """
        if self._executor is None:
            raise WorkerFailedError("the worker group is not running")
        return self._executor

    def start(self) -> WorkerReady:
        """Start a group and warm it up. Nothing of it is left when this raises.

        Raises:
            OmniError: if it does not come up, or :meth:`shutdown` was called.
        """
        self._refuse_ended()
        executor = self._make_executor()
        self._executor = executor
        try:
            ready = executor.start()
            self._refuse_ended()
            if self._warm_up is not None:
                self._run_warm_up(executor, ready, self._warm_up)
        except BaseException:
            # Not left to the end of the executor's life: the error holds it by its traceback.
            self._drop()
            raise
        self._refuse_ended()
        return ready

    def relaunch(self) -> WorkerReady:
        """End what is left of the group and start another, backing off between tries.

        Any failure to start is tried again, since what a lost rank held may come back late, device
        memory above all; only files and settings stay as they are.

        Raises:
            WorkerFailedError: after five restarts within ten minutes, or :meth:`shutdown`.
            CheckpointError, ConfigError: at once.
        """
        last: OmniError | None = None
        while True:
            self._drop()
            self._count_restart(last)
            self._sleep(_FIRST_DELAY_S * (2 ** (len(self._restarts_s) - 1)))
            try:
                return self.start()
            except (CheckpointError, ConfigError):
                raise
            except OmniError as error:
                if self._ended.is_set():
                    raise
                logger.warning("the worker group failed to start again: %s", error)
                last = error

    def shutdown(self) -> None:
        """End the group for good; a second call does nothing."""
        self._ended.set()
        self._drop()

    def _refuse_ended(self) -> None:
        if self._ended.is_set():
            self._drop()
            raise WorkerFailedError("the worker group was shut down")

    def _drop(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()

    def _count_restart(self, last: OmniError | None) -> None:
        now = time.monotonic()
        self._restarts_s = [at for at in self._restarts_s if now - at < RESTART_WINDOW_S]
        if len(self._restarts_s) >= MAX_RESTARTS:
            why = "see the log of the workers" if last is None else f"the last start failed: {last}"
            raise WorkerFailedError(
                f"the worker group was restarted {MAX_RESTARTS} times within "
                f"{RESTART_WINDOW_S / 60:.0f} minutes; giving up, {why}"
            )
        self._restarts_s.append(now)

    @staticmethod
    def _run_warm_up(executor: Executor, ready: WorkerReady, geometry: VideoGeometry) -> None:
        started = time.monotonic()
        plans = warm_up_plans(ready)
        executor.open_session(plans[0].session_id, warm_up_request(geometry))
        for number, plan in enumerate(plans, 1):
            logger.info("warm-up: chunk %d of %d", number, len(plans))
            executor.run_chunk(plan, lambda _: None)
        executor.close_session(plans[0].session_id)
        logger.info(
            "warmed up %d chunks at %s in %.1f s",
            *(len(plans), geometry, time.monotonic() - started),
        )
