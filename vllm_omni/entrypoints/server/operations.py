"""Routes for operators and client start-up: health, models, version, metrics, capabilities."""

from __future__ import annotations

import time
import uuid
from dataclasses import asdict

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from vllm_omni import __version__
from vllm_omni.entrypoints.server.protocol import Capabilities
from vllm_omni.entrypoints.server.state import ServerState

_UNAVAILABLE = 503


def operations_router(state: ServerState) -> APIRouter:
    """Routes that answer whether or not the engine is ready."""
    router = APIRouter()
    created = int(time.time())

    @router.get("/health")
    async def health() -> JSONResponse:
        """Readiness: 200 once sessions can be served, else 503 with the reason."""
        engine = state.client.engine
        kept = {"quarantined_failures": engine.quarantined}
        if engine.unready_reason is None:
            return JSONResponse({"status": "healthy", **kept})
        refusal = {"status": "unhealthy", "reason": engine.unready_reason}
        return JSONResponse(refusal | kept, _UNAVAILABLE)

    @router.get("/ping")
    @router.post("/ping")
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

    @router.get("/metrics")
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
    async def replicas() -> dict[str, object]:
        """What is known of each replica, and how many sessions wait for all of them."""
        return _replicas(state)

    @router.get("/v1/realtime/capabilities")
    async def capabilities() -> Capabilities:
        """Answer with what ``session.start`` may ask for."""
        return state.capabilities()

    return router


def admin_router(state: ServerState) -> APIRouter:
    """Routes that change the server; access control asks for an operator's key."""
    router = APIRouter(prefix="/admin")

    @router.post("/replicas/{number}/drain")
    def drain_replica(number: int) -> dict[str, object]:
        """Give a replica no new session; it ends for good with the last that it has."""
        state.client.engine.drain_replica(number)
        return _replicas(state)

    return router


def _replicas(state: ServerState) -> dict[str, object]:
    engine = state.client.engine
    known = [asdict(status) for status in engine.replicas()]
    return {"object": "list", "data": known, "waiting": engine.num_waiting}


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
