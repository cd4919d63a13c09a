"""Starts the worker group, warms it up, and makes a new one when it is lost."""

import threading
import time
from collections.abc import Callable

import numpy as np

from vllm_omni.diffusion.executor import Executor
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, VideoGeometry
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    GroupCapacity,
    LiveCamera,
    SessionRequest,
    SourceImage,
    TokenizedPrompt,
)
from vllm_omni.errors import CheckpointError, ConfigError, OmniError, WorkerFailedError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

MAX_RESTARTS = 5
RESTART_WINDOW_S = 600.0
_FIRST_DELAY_S = 0.5
_WARM_UP_ID = "warm-up"


class WorkerSupervisor:
    """Owns the one executor that is alive. Used by one thread; any may call :meth:`shutdown`.

    Args:
        make_executor: makes a group that is not started; called once per generation.
        warm_up: of which chunks are made before the group counts as ready, with a live camera;
            ``None`` for none.
        sleep: waits between restarts; by default until the time is over or the group is shut down.
    """

    def __init__(
        self,
        make_executor: Callable[[], Executor],
        *,
        warm_up: SessionRequest | None,
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
        """The executor of the worker group that runs now.

        Raises:
            WorkerFailedError: if there is none.
        """
        if self._executor is None:
            raise WorkerFailedError("the worker group is not running")
        return self._executor

    def start(self) -> GroupCapacity:
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

    def relaunch(self) -> GroupCapacity:
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
    def _run_warm_up(executor: Executor, ready: GroupCapacity, request: SessionRequest) -> None:
        started = time.monotonic()
        plans = _warm_up_plans(ready)
        executor.open_session(_WARM_UP_ID, request)
        for number, plan in enumerate(plans, 1):
            logger.info("warm-up: chunk %d of %d", number, len(plans))
            executor.run_chunk(plan, lambda _: None)
        executor.close_session(_WARM_UP_ID)
        logger.info(
            "warmed up %d chunks at %s in %.1f s",
            *(len(plans), request.geometry, time.monotonic() - started),
        )


def warm_up_request(geometry: VideoGeometry, prompt: TokenizedPrompt) -> SessionRequest:
    """A grey picture and a still camera at a configured size."""
    return SessionRequest(
        prompt=prompt,
        image=SourceImage(rgb=np.full((geometry.height, geometry.width, 3), 127, np.uint8)),
        height=geometry.height,
        width=geometry.width,
        num_chunks=None,
        seed=0,
        camera=LiveCamera(),
    )


def _warm_up_plans(ready: GroupCapacity) -> list[ChunkPlan]:
    """Chunks until the window is full and has rolled once."""
    filling = -(-ready.window_frames // LATENT_FRAMES_PER_CHUNK)
    still = np.broadcast_to(np.eye(4), (LATENT_FRAMES_PER_CHUNK, 4, 4)).copy()
    return [ChunkPlan(_WARM_UP_ID, index, poses=still) for index in range(filling + 2)]
