"""Videos that are made while nobody waits: records in memory, files in the store.

Records and files live as long as the server at most; nothing is found again after a restart.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, Field

from vllm_omni.diffusion.messages import SourceImage
from vllm_omni.entrypoints.server.http_errors import HttpRefusalError, message_of, status_of
from vllm_omni.entrypoints.server.state import ServerState
from vllm_omni.entrypoints.server.video_rollout import FinishedVideo, VideoRequest, VideoRollout
from vllm_omni.entrypoints.server.video_store import VideoStore
from vllm_omni.inputs.checking import told_seed
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

RETENTION_S = 24 * 3600.0
"""How long a finished or failed job is kept."""
MAX_JOBS = 1000
"""Jobs kept at once; the oldest that is over makes room for a new one."""
MAX_STORED_BYTES = 16 * 2**30
"""Bytes of all files; the oldest finished jobs make room for a new file."""
MEDIA_TYPE = "video/mp4"
_MIB = 2**20
_NO_PICTURE = SourceImage(rgb=np.zeros((1, 1, 3), np.uint8))

Order = Literal["asc", "desc"]


class VideoStatus(StrEnum):
    """How far a job has come."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"


class VideoJob(BaseModel):
    """A job as clients see it."""

    id: str
    object: Literal["video"] = "video"
    model: str
    prompt: str
    status: VideoStatus
    size: str
    progress: int = Field(description="percent of the chunks that are made")
    seconds: str
    quality: str | None
    created_at: int
    completed_at: int | None
    expires_at: int | None
    remixed_from_video_id: str | None = None
    error: dict[str, str] | None = Field(description="code and message of a failed job")
    media_type: str = MEDIA_TYPE
    file_name: str | None
    inference_time_s: float | None
    fps: float
    num_frames: int
    duration_s: float
    metrics: dict[str, int | str | None] = Field(
        description="num_chunks, and the seed that was taken or drawn"
    )
    stage_durations: dict[str, float] = Field(description="seconds by part of a chunk")
    peak_memory_mb: float | None
    action: str | None = None


class VideoList(BaseModel):
    """Jobs by age, of which there may be more."""

    object: Literal["list"] = "list"
    data: list[VideoJob]
    first_id: str | None
    last_id: str | None
    has_more: bool


@dataclass(slots=True)
class Job:
    """One job; changed by its task, by the end of that task, and by who deletes it.

    Attributes:
        failure: HTTP status and text, set when the job failed.
        file: the finished video.
        stored_bytes: size of its file, from the moment at which it is being written.
        deleting: whether a client is deleting it.
    """

    request: VideoRequest
    model: str
    created_at: float = field(default_factory=time.time)
    status: VideoStatus = VideoStatus.QUEUED
    progress: int = 0
    ended_at: float | None = None
    failure: tuple[int, str] | None = None
    file: Path | None = None
    stored_bytes: int = 0
    video: FinishedVideo | None = None
    deleting: bool = False

    @property
    def video_id(self) -> str:
        """What the client knows the job by; the log names it, too."""
        return self.request.request_id

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in {VideoStatus.COMPLETED, VideoStatus.FAILED}

    def advanced(self, share: float) -> None:
        """Take note of progress; the first call marks the begin of the work."""
        self.status = VideoStatus.IN_PROGRESS
        self.progress = min(int(share * 100), 99)

    def completed(self, file: Path, video: FinishedVideo) -> None:
        """Take over the finished video; the job is over."""
        # The pictures are in the file; only the figures stay in memory.
        self.file, self.video = file, replace(video, mp4=b"")
        self.progress = 100
        self._end(VideoStatus.COMPLETED)

    def failed(self, error: BaseException) -> None:
        """Note why there will be no video; the job is over."""
        self.failure = (status_of(error), message_of(error))
        self.stored_bytes = 0
        self._end(VideoStatus.FAILED)

    def _end(self, status: VideoStatus) -> None:
        # The first picture has done its work, and may have 50 MB.
        session = replace(self.request.session, image=_NO_PICTURE)
        self.request = replace(self.request, session=session)
        self.status, self.ended_at = status, time.time()

    def told(self) -> VideoJob:
        """Return the job as clients see it."""
        session, video = self.request.session, self.video
        duration_s = self.request.duration_s
        return VideoJob(
            id=self.video_id,
            model=self.model,
            prompt=session.prompt.text,
            status=self.status,
            size=f"{session.width}x{session.height}",
            progress=self.progress,
            seconds=str(max(round(duration_s), 1)),
            quality=self.request.quality,
            created_at=int(self.created_at),
            completed_at=None if self.file is None else int(self.ended_at or 0),
            expires_at=None if self.ended_at is None else int(self.ended_at + RETENTION_S),
            error=self.failure and {"code": str(self.failure[0]), "message": self.failure[1]},
            file_name=None if self.file is None else self.file.name,
            inference_time_s=None if video is None else video.inference_s,
            fps=session.fps,
            num_frames=self.request.num_frames,
            duration_s=duration_s,
            metrics={"num_chunks": session.num_chunks, "seed": told_seed(session.seed)},
            stage_durations={} if video is None else video.stage_durations,
            peak_memory_mb=None if video is None else video.peak_bytes / _MIB,
        )


class VideoJobs:
    """All jobs of a server. Used on the event loop."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._store = VideoStore()

    async def add(self, request: VideoRequest, model: str) -> Job:
        """Put a job in the engine's line.

        Raises:
            OmniError: if the engine refuses it; then there is no job.
            HttpRefusalError: 503 if as many jobs run as are kept, or the video could not be stored.
        """
        await self._state.in_thread(self._store.require_room, request.expected_bytes)
        oldest = self._job_to_forget()
        job = Job(request, model)
        rollout = VideoRollout(self._state, request)
        if oldest is not None:  # Not before the engine has accepted the new one.
            self._forget(oldest)
        self._jobs[job.video_id] = job
        task = asyncio.create_task(self._run(job, rollout), name=job.video_id)
        self._tasks[job.video_id] = task
        task.add_done_callback(lambda done: self._settle(job, rollout, done))
        return job

    def get(self, video_id: str) -> Job:
        """Return the job of this id.

        Raises:
            HttpRefusalError: 404 if there is none.
        """
        job = self._jobs.get(video_id)
        if job is None:
            raise HttpRefusalError(404, f"there is no video {video_id!r:.100}")
        return job

    def page(self, *, after: str | None, limit: int, order: Order) -> tuple[list[Job], bool]:
        """Jobs by age, and whether there are more.

        Args:
            after: id of the last job of the page before.
            order: ``asc`` for the oldest first.
        """
        jobs = list(self._jobs.values())
        if order == "desc":
            jobs.reverse()
        if after is not None:
            jobs = jobs[jobs.index(self.get(after)) + 1 :]
        return jobs[:limit], len(jobs) > limit

    def content(self, video_id: str) -> Path:
        """File of a finished video.

        Raises:
            HttpRefusalError: 404 if there is no such job, 422 if it has no video (yet), 410 if
                somebody has removed the file.
        """
        job = self.get(video_id)
        if job.file is None:
            reason = job.failure[1] if job.failure else f"it is {job.status}"
            raise HttpRefusalError(422, f"video {video_id} has no content: {reason}")
        if not job.file.is_file():
            raise HttpRefusalError(
                410, f"the file of video {video_id} was removed from the server's storage"
            )
        return job.file

    async def delete(self, video_id: str) -> None:
        """Forget a job and its file; one that runs is stopped at its next chunk boundary.

        Raises:
            HttpRefusalError: 404 if there is none, 409 if it is being deleted already.
        """
        job = self.get(video_id)
        if job.deleting:
            raise HttpRefusalError(409, f"video {video_id} is being deleted")
        job.deleting = True
        task = self._tasks.get(video_id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        self._forget(job)

    async def close(self) -> None:
        """Stop what runs and remove all files."""
        tasks = set(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for job in list(self._jobs.values()):
            self._forget(job)
        self._store.close()

    async def _run(self, job: Job, rollout: VideoRollout) -> None:
        video = await rollout.collect(job.advanced)
        self._reserve(job, len(video.mp4))
        name = f"{job.video_id}.mp4"
        storing = asyncio.ensure_future(self._state.in_thread(self._store.put, name, video.mp4))
        try:
            path = await asyncio.shield(storing)
        except asyncio.CancelledError:
            # Its thread cannot be stopped: the file would appear after the job is forgotten.
            for stored in await asyncio.gather(storing, return_exceptions=True):
                if isinstance(stored, Path):
                    stored.unlink(missing_ok=True)
            raise
        job.completed(path, video)

    def _settle(self, job: Job, rollout: VideoRollout, task: asyncio.Task[None]) -> None:
        """Record the end of a job's task, however it ended."""
        rollout.abandon()
        del self._tasks[job.video_id]
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            job.failed(error)
            logger.error("video %s failed", job.video_id, exc_info=error)
        self._expiries[job.video_id] = asyncio.get_running_loop().call_later(
            RETENTION_S, self._forget, job
        )

    def _reserve(self, job: Job, num_bytes: int) -> None:
        """Make room for a file.

        Raises:
            HttpRefusalError: 503 if the files that are being written leave none.
        """
        jobs = self._jobs.values()
        if sum(other.stored_bytes for other in jobs if other.file is None) + num_bytes > (
            MAX_STORED_BYTES
        ):
            raise HttpRefusalError(
                503,
                f"there is no room for a file of {num_bytes} bytes: all files together may have "
                f"{MAX_STORED_BYTES}",
            )
        while sum(other.stored_bytes for other in jobs) + num_bytes > MAX_STORED_BYTES:
            self._forget(next(other for other in jobs if other.file is not None))
        job.stored_bytes = num_bytes

    def _forget(self, job: Job) -> None:
        self._jobs.pop(job.video_id, None)
        expiry = self._expiries.pop(job.video_id, None)
        if expiry is not None:
            expiry.cancel()
        if job.file is not None:
            job.file.unlink(missing_ok=True)

    def _job_to_forget(self) -> Job | None:
        """Which job makes room for one more, where one has to."""
        if len(self._jobs) < MAX_JOBS:
            return None
        over = next((job for job in self._jobs.values() if job.is_over), None)
        if over is None:
            raise HttpRefusalError(503, f"{MAX_JOBS} videos are being made; try again later")
        return over
