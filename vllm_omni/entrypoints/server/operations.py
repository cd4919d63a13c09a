"""Routes for operators and client start-up: health, models, version, metrics, capabilities."""

from __future__ import annotations

import time
import uuid
from typing import Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel

from vllm_omni import __version__
from vllm_omni.engine.roster import ReplicaStatus
from vllm_omni.entrypoints.server.http_errors import ANY_REFUSAL, refusals
from vllm_omni.entrypoints.server.protocol import Capabilities
from vllm_omni.entrypoints.server.state import ServerState


class Health(BaseModel):
    """Whether sessions can be served, and why not."""

    status: Literal["healthy", "unhealthy"]
    reason: str | None = None
    quarantined_failures: int


class Replicas(BaseModel):
    """What is known of each replica, and how many sessions wait for all of them."""

    object: Literal["list"] = "list"
    data: list[ReplicaStatus]
    waiting: int


_UNHEALTHY = {"model": Health, "description": "no session can be served now"}
_TEXT = {"content": {"text/plain": {"schema": {"type": "string"}}}}


def operations_router(state: ServerState) -> APIRouter:
    """Routes that answer whether or not the engine is ready."""
    router = APIRouter(responses=ANY_REFUSAL)
    created = int(time.time())

    @router.get("/health", response_model=Health, responses={503: _UNHEALTHY})
    async def health() -> JSONResponse:
        """Readiness: 200 once sessions can be served, else 503 with the reason."""
        engine = state.client.engine
        reason = engine.unready_reason
        found = Health(
            status="healthy" if reason is None else "unhealthy",
            reason=reason,
            quarantined_failures=engine.quarantined,
        )
        status = 200 if reason is None else 503
        return JSONResponse(found.model_dump(exclude_none=True), status)

    @router.get("/ping", response_class=Response)
    @router.post("/ping", response_class=Response)
    async def ping() -> Response:
        """Liveness: 200 as long as the process answers."""
        return Response(status_code=200)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Answer with the version of the package."""
        return {"version": __version__}

    @router.get("/load")
    async def load() -> dict[str, int]:
        """Answer with the number of sessions on the workers and in line."""
        return {"server_load": state.client.engine.num_sessions}

    @router.get("/metrics", response_class=Response, responses={200: _TEXT})
    async def metrics() -> Response:
        """Answer with all figures in Prometheus' text format."""
        body = generate_latest(state.client.engine.metrics.registry)
        return Response(body, media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/models")
    async def models() -> dict[str, object]:
        """Answer with one entry per served name."""
        root = state.client.deployment.config.model
        names = state.config.served_model_names
        return {"object": "list", "data": [_model(name, root, created) for name in names]}

    @router.get("/v1/replicas")
    async def replicas() -> Replicas:
        """What is known of each replica, and how many sessions wait for all of them."""
        return _replicas(state)

    @router.get("/v1/realtime/capabilities")
    async def capabilities() -> Capabilities:
        """Answer with what ``session.start`` may ask for."""
        return state.capabilities()

    return router


def admin_router(state: ServerState) -> APIRouter:
    """Routes that change the server; access control asks for an operator's key."""
    router = APIRouter(prefix="/admin", responses=ANY_REFUSAL)

    refused = {400: "there is no such replica, or no other one that serves",
               422: "the number is none"}  # fmt: skip

    @router.post("/replicas/{number}/drain", responses=refusals(refused))
    def drain_replica(number: int) -> Replicas:
        """Give a replica no new session; it ends for good with the last that it has."""
        state.client.engine.drain_replica(number)
        return _replicas(state)

    return router


def _replicas(state: ServerState) -> Replicas:
    engine = state.client.engine
    return Replicas(data=list(engine.replicas()), waiting=engine.num_waiting)


def _model(name: str, root: str, created: int) -> dict[str, object]:
    permission = {
        "id": f"modelperm-{uuid.uuid4().hex}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": None,
        "max_model_len": None,
        "permission": [permission],
    }
