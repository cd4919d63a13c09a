"""``/v1/videos``: whole videos over plain HTTP, waited for or as jobs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import BeforeValidator

from vllm_omni import envs
from vllm_omni.engine.session import StopCause
from vllm_omni.entrypoints.server.http_errors import (
    ANY_REFUSAL,
    CLIENT_LEFT,
    Error,
    HttpRefusalError,
    error_response,
    refusals,
    refusals_counted,
    status_of,
)
from vllm_omni.entrypoints.server.request_ids import name_request, name_result
from vllm_omni.entrypoints.server.start import SessionStart
from vllm_omni.entrypoints.server.state import ServerState
from vllm_omni.entrypoints.server.video_form import body_schema, read_body, refuse_repeated
from vllm_omni.entrypoints.server.video_jobs import (
    MEDIA_TYPE,
    Order,
    VideoJob,
    VideoJobs,
    VideoList,
)
from vllm_omni.entrypoints.server.video_rollout import FinishedVideo, VideoRollout, prepare
from vllm_omni.logger import get_logger
from vllm_omni.wording import shown

logger = get_logger(__name__)

_MIB = 2**20
_PREFIX = "/v1/videos"
_VIDEO = {"content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
_SYNC_HEADERS = (
    "X-Request-Id", "X-Model", "X-Seed", "X-Num-Frames", "X-Fps", "X-Inference-Time-S",
    "X-Stage-Durations", "X-Peak-Memory-MB",
)  # fmt: skip
_SYNC_VIDEO = _VIDEO | {"headers": {one: {"schema": {"type": "string"}} for one in _SYNC_HEADERS}}
_NO_VIDEO = {404: "no such video"}
_MAKING = {
    400: "the model cannot serve this, or fields contradict each other",
    408: "the body was not complete in time",
    413: "the body is too large",
    415: "the body is no form and no JSON",
    422: "a field breaks its schema",
    500: "a chunk or the encoder failed",
    503: "loading, draining, full, or workers were lost; Retry-After is set",
}
_LISTING = _NO_VIDEO | {400: "a parameter is given twice", 422: "a parameter breaks its schema"}
_DELETING = _NO_VIDEO | {409: "the video is being deleted already"}
_FETCHING = _NO_VIDEO | {
    400: "the range cannot be read",
    410: "the file is gone",
    416: "the range is outside the file",
    422: "there is no video (yet)",
}
_FAILED_JOB: dict[str, Any] = {
    "model": VideoJob | Error,
    "description": "the job failed; this is the job, or else the error that asking for it met",
}


def _in_digits(written: str) -> str:
    """Refuse what only Python reads as a number, ``1_000``."""
    if not (written.isascii() and written.isdigit()):
        raise ValueError(f"must be an integer, got {shown(written)}")
    return written


def videos_router(state: ServerState) -> APIRouter:
    """The routes, with the job store that they share."""
    jobs = VideoJobs(state)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await jobs.close()

    router = APIRouter(lifespan=lifespan, tags=["videos"], responses=ANY_REFUSAL)
    _add_making_routes(router, state, jobs)
    _add_job_routes(router, jobs)
    return router


def _add_making_routes(router: APIRouter, state: ServerState, jobs: VideoJobs) -> None:
    late = {504: "the video was not finished in time"}

    @router.post(
        f"{_PREFIX}/sync",
        openapi_extra=body_schema(),
        response_class=Response,
        responses={200: _SYNC_VIDEO} | refusals(_MAKING | late),
    )
    async def make_video(request: Request) -> Response:
        """Make a video and answer with it: one MP4 with its index in front."""
        return await SyncVideo(state, request).answer()

    @router.post(
        _PREFIX,
        openapi_extra=body_schema(),
        response_model=VideoJob,
        responses=refusals(_MAKING),
    )
    async def create_job(request: Request) -> JSONResponse:
        """Start a video and answer at once with its job; errors of the request come at once."""
        request_id = name_result("video_gen_")
        with refusals_counted(state.client.engine.metrics, request_id):
            _check_ready(state)
            body = await read_body(request, state)
            start = body.start
            prepared = await prepare(state, start, request_id)
            job = await jobs.add(prepared, start.model or state.config.served_model_names[0])
        return JSONResponse(job.told().model_dump(), headers=body.warnings)


def _add_job_routes(router: APIRouter, jobs: VideoJobs) -> None:
    @router.get(_PREFIX, response_model=VideoList, responses=refusals(_LISTING))
    async def list_jobs(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=0, le=100), BeforeValidator(_in_digits)] = 20,
        order: Order = "desc",
    ) -> JSONResponse:
        """Jobs by age, newest first unless asked otherwise."""
        refuse_repeated(request.query_params)
        page, has_more = jobs.page(after=after, limit=limit, order=order)
        listed = VideoList(
            data=[job.told() for job in page],
            first_id=page[0].video_id if page else None,
            last_id=page[-1].video_id if page else None,
            has_more=has_more,
        )
        return JSONResponse(listed.model_dump())

    @router.get(
        f"{_PREFIX}/{{video_id}}",
        response_model=VideoJob,
        responses=refusals(_NO_VIDEO) | dict.fromkeys((400, 500, 503), _FAILED_JOB),
    )
    async def get_job(video_id: str) -> JSONResponse:
        """One job; a failed one with the status of its failure."""
        job = jobs.get(video_id)
        return JSONResponse(job.told().model_dump(), 200 if job.failure is None else job.failure[0])

    @router.delete(f"{_PREFIX}/{{video_id}}", responses=refusals(_DELETING))
    async def delete_job(video_id: str) -> dict[str, object]:
        """Forget a job and its file; a running one is stopped."""
        await jobs.delete(video_id)
        return {"id": video_id, "deleted": True, "object": "video.deleted"}

    @router.get(
        f"{_PREFIX}/{{video_id}}/content",
        response_class=FileResponse,
        responses={200: _VIDEO, 206: _VIDEO | {"description": "a part of the file"}}
        | refusals(_FETCHING),
    )
    async def get_content(video_id: str) -> FileResponse:
        """The finished MP4; ranges are served."""
        file = jobs.content(video_id)
        return FileResponse(file, media_type=MEDIA_TYPE, filename=file.name)


class SyncVideo:
    """One ``POST /v1/videos/sync``: ends with its video, its failure, its client or its time."""

    def __init__(self, state: ServerState, request: Request) -> None:
        self._state = state
        self._request = request
        self._request_id = name_request("video_sync-")
        self._metrics = state.client.engine.metrics
        self._is_open = False

    async def answer(self) -> Response:
        """The response; the session is over when it is returned."""
        deadline = time.monotonic() + envs.video_sync_timeout_s()
        with refusals_counted(self._metrics, self._request_id):
            _check_ready(self._state)
            body = await read_body(self._request, self._state)
        start = body.start
        model = start.model or self._state.config.served_model_names[0]
        making = asyncio.create_task(self._make(start), name=self._request_id)
        leaving = asyncio.create_task(self._client_left(), name=f"{self._request_id} client")
        try:
            await asyncio.wait(
                {making, leaving},
                timeout=max(deadline - time.monotonic(), 0.0),
                return_when=asyncio.FIRST_COMPLETED,
            )
            done, left = making.done(), leaving.done()
        finally:
            making.cancel()
            leaving.cancel()
            await asyncio.gather(making, leaving, return_exceptions=True)
        if done:
            answer = self._result(making, model)
            answer.headers.update(body.warnings)
            return answer
        if not self._is_open:  # The engine counts a session that it has.
            self._metrics.stopped(StopCause.DISCONNECTED)
        return Response(status_code=CLIENT_LEFT) if left else self._too_late()

    async def _make(self, start: SessionStart) -> FinishedVideo:
        with refusals_counted(self._metrics, self._request_id):
            prepared = await prepare(self._state, start, self._request_id)
            rollout = VideoRollout(self._state, prepared)
        self._is_open = True
        return await rollout.collect()

    async def _client_left(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass

    def _result(self, making: asyncio.Task[FinishedVideo], model: str) -> Response:
        error = making.exception()
        if error is None:
            video = making.result()
            headers = {
                "X-Model": _in_header(model),
                "X-Seed": f"{video.seed}",
                "X-Num-Frames": f"{video.num_frames}",
                "X-Fps": f"{video.fps:g}",
                "X-Inference-Time-S": f"{video.inference_s:.3f}",
                "X-Stage-Durations": json.dumps(video.stage_durations),
                "X-Peak-Memory-MB": f"{video.peak_bytes / _MIB:.3f}",
            }
            return Response(video.mp4, media_type=MEDIA_TYPE, headers=headers)
        if status_of(error) >= 500:
            logger.error("%s failed", self._request_id, exc_info=error)
        return error_response(error)

    def _too_late(self) -> Response:
        limit_s = envs.video_sync_timeout_s()
        message = (
            f"the video was not finished within {limit_s} s (VLLM_OMNI_VIDEO_SYNC_TIMEOUT); "
            "POST /v1/videos makes it as a job"
        )
        return error_response(HttpRefusalError(504, message))


def _in_header(text: str) -> str:
    """Text of the operator as a header can carry it: percent-encoded where it is no plain ASCII."""
    return text if text.isascii() and text.isprintable() else quote(text)


def _check_ready(state: ServerState) -> None:
    reason = state.client.engine.unready_reason
    if reason is not None:
        raise HttpRefusalError(503, f"no video can be made now: {reason}")
