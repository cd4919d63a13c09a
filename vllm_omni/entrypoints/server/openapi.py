"""The routes described: ``/openapi.json`` for programs, and the page ``/docs`` without other hosts.

The schema says what the routes themselves do not: errors, videos, keys, examples.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from vllm_omni import __version__

_EXAMPLE = {
    "prompt": "A quiet harbour at dawn.",
    "size": "832x480",
    "num_frames": 81,
    "fps": 16,
    "seed": 7,
    "image_reference": {"image_url": "https://example.com/harbour.png"},
}
_TEXT, _NUMBER, _COUNT = {"type": "string"}, {"type": "number"}, {"type": "integer"}
_OBJECT = {"type": "object"}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code", "request_id"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT | {"description": "invalid_request, server_full, server_error, ..."},
                "param": {
                    "type": ["string", "null"],
                    "description": "name of the field that is wrong, where one is",
                },
                "code": _COUNT | {"description": "status of the answer"},
                "request_id": _TEXT | {"description": "the same as the header X-Request-Id"},
            },
        }
    },
    "example": {
        "error": {
            "message": "num_frames: a rollout has 9 + 12k pixel frames (9, 21, 33, ...), got 80",
            "type": "invalid_request",
            "param": "num_frames",
            "code": 400,
            "request_id": "4939d27c",
        }
    },
}


def _or_null(kind: dict[str, Any]) -> dict[str, Any]:
    return {"type": [kind["type"], "null"]}


_JOB = {
    "type": "object",
    "required": ["id", "object", "status", "progress"],
    "properties": {
        "id": _TEXT,
        "object": {"const": "video"},
        "status": {"enum": ["queued", "in_progress", "completed", "failed"]},
        "progress": _COUNT | {"description": "percent of the chunks that are made"},
        **dict.fromkeys(("model", "prompt", "size", "seconds", "media_type"), _TEXT),
        **dict.fromkeys(("fps", "duration_s"), _NUMBER),
        **dict.fromkeys(("num_frames", "created_at"), _COUNT),
        **dict.fromkeys(("completed_at", "expires_at"), _or_null(_COUNT)),
        **dict.fromkeys(("file_name", "quality", "remixed_from_video_id", "action"),
                        _or_null(_TEXT)),
        **dict.fromkeys(("inference_time_s", "peak_memory_mb"), _or_null(_NUMBER)),
        "error": _or_null(_OBJECT) | {"description": "code and message of a failed job"},
        "metrics": _OBJECT | {"description": "num_chunks, and the seed that was taken or drawn"},
        "stage_durations": _OBJECT | {"description": "seconds by part of a chunk"},
    },
}  # fmt: skip
_HEALTH = {
    "type": "object",
    "required": ["status"],
    "properties": {
        "status": {"enum": ["healthy", "unhealthy"]},
        "reason": _TEXT,
        "quarantined_failures": _COUNT,
    },
}
_KEYED = ("/v1", "/admin")
"""Where paths begin that may need a key."""
_VIDEO = {"video/mp4": {"schema": {"type": "string", "format": "binary"}}}
_MAKING = {
    400: "the model cannot serve this, or fields contradict each other",
    408: "the body was not complete in time",
    413: "the body is too large",
    415: "the body is no form and no JSON",
    422: "a field breaks its schema",
    500: "a chunk or the encoder failed",
    503: "loading, draining, full, or workers were lost; Retry-After is set",
}
_NO_VIDEO = {404: "no such video"}
_REFUSALS: dict[tuple[str, str], dict[int, str]] = {
    ("/admin/replicas/{number}/drain", "post"): {
        400: "there is no such replica, or no other one that serves",
        422: "the number is none",
    },
    ("/v1/videos", "post"): _MAKING,
    ("/v1/videos/sync", "post"): _MAKING | {504: "the video was not finished in time"},
    ("/v1/videos", "get"): _NO_VIDEO
    | {400: "a parameter is given twice", 422: "a parameter breaks its schema"},
    ("/v1/videos/{video_id}", "delete"): _NO_VIDEO | {409: "the video is being deleted already"},
    ("/v1/videos/{video_id}/content", "get"): _NO_VIDEO
    | {
        400: "the range cannot be read",
        410: "the file is gone",
        416: "the range is outside the file",
        422: "there is no video (yet)",
    },
}
"""What a route may answer beside its answer, by path and method."""
_JOB_STATUSES = ("400", "500", "503")
_SYNC_HEADERS = (
    "X-Request-Id", "X-Model", "X-Seed", "X-Num-Frames", "X-Fps", "X-Inference-Time-S",
    "X-Stage-Durations", "X-Peak-Memory-MB",
)  # fmt: skip


def describe(routers: Iterable[APIRouter], *, title: str, needs_key: bool) -> dict[str, Any]:
    """Describe the routes of an application.

    Args:
        needs_key: whether the routes below ``/v1`` need a key.
    """
    routes = [route for router in routers for route in router.routes]
    schema = get_openapi(title=title, version=__version__, routes=routes)
    _add_components(schema)
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            _describe_operation(operation, path, method)
            if path.startswith(_KEYED):
                required = needs_key or not path.startswith("/v1")
                operation["security"] = [{"bearer": []}] if required else [{}, {"bearer": []}]
    _describe_answers(schema["paths"])
    return schema


def _add_components(schema: dict[str, Any]) -> None:
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= {"Error": _ERROR, "VideoJob": _JOB, "Health": _HEALTH}
    components["securitySchemes"] = {
        "bearer": {
            "type": "http",
            "scheme": "bearer",
            "description": "a key of --api-key; of --admin-key below /admin",
        }
    }


def _describe_operation(operation: dict[str, Any], path: str, method: str) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    if path.startswith(_KEYED):
        responses["401"] = _refusal("no valid API key")
    if method not in {"get", "head"}:
        responses["403"] = _refusal("a page of another origin")
    for status, text in _REFUSALS.get((path, method), {}).items():
        responses[str(status)] = _refusal(text)
    responses["default"] = _refusal("any other error, in the same shape")
    for content in operation.get("requestBody", {}).get("content", {}).values():
        content["example"] = _EXAMPLE


def _describe_answers(paths: dict[str, Any]) -> None:
    sync = paths["/v1/videos/sync"]["post"]["responses"]["200"]
    sync["content"] = _VIDEO
    sync["headers"] = {name: {"schema": _TEXT} for name in _SYNC_HEADERS}
    content = paths["/v1/videos/{video_id}/content"]["get"]["responses"]
    content["200"]["content"] = _VIDEO
    content["206"] = {"description": "a part of the file", "content": _VIDEO}
    paths["/v1/videos"]["post"]["responses"]["200"]["content"] = _json("VideoJob")
    job = paths["/v1/videos/{video_id}"]["get"]["responses"]
    job["200"]["content"] = _json("VideoJob")
    job["404"] = _refusal("no such video")
    for status in _JOB_STATUSES:
        text = "the job failed; this is the job, or else the error that asking for it met"
        either = {"oneOf": [_reference("VideoJob"), _reference("Error")]}
        job[status] = {"description": text, "content": {"application/json": {"schema": either}}}
    listed = paths["/v1/videos"]["get"]["responses"]["200"]
    page = {"type": "object", "properties": {
        "object": {"const": "list"},
        "data": {"type": "array", "items": _reference("VideoJob")},
        "has_more": {"type": "boolean"},
        **dict.fromkeys(("first_id", "last_id"), _or_null(_TEXT)),
    }}  # fmt: skip
    listed["content"] = {"application/json": {"schema": page}}
    health = paths["/health"]["get"]["responses"]
    health["200"]["content"] = health_content = _json("Health")
    health["503"] = {"description": "no session can be served now", "content": health_content}
    paths["/metrics"]["get"]["responses"]["200"]["content"] = {"text/plain": {"schema": _TEXT}}
    for method in ("get", "post"):
        paths["/ping"][method]["responses"]["200"].pop("content", None)


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": _reference(name)}}


def _refusal(text: str) -> dict[str, Any]:
    return {"description": text, "content": _json("Error")}


_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer; padding: .4rem 0 } code, pre { font-family: ui-monospace, monospace }
pre { overflow-x: auto; padding: .8rem; border: 1px solid #8886 }
b { display: inline-block; width: 5rem } table { border-collapse: collapse }
td { padding: .2rem .8rem .2rem 0; vertical-align: top }
"""


def api_page_route(schema: Mapping[str, Any]) -> Route:
    """The route of the page, which is written here, once."""
    page = f"<!doctype html>{''.join(_page(schema))}"

    async def docs(_: Request) -> Response:
        return HTMLResponse(page, headers=_HEADERS)

    return Route("/docs", docs, include_in_schema=False)


def _page(schema: Mapping[str, Any]) -> Iterator[str]:
    title = f"{schema['info']['title']} {schema['info']['version']}"
    yield f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    yield f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
    yield f"<body><h1>{escape(title)}</h1><p>For programs: <a href='openapi.json'>openapi.json"
    yield "</a>. The live socket is <code>WS /v1/realtime/video</code>.</p>"
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            yield from _operation(path, method, operation)
    yield "<h2>Schemas</h2>"
    for name, definition in schema["components"]["schemas"].items():
        text = escape(json.dumps(definition, indent=2))
        yield f"<details id='{escape(name)}'><summary>{escape(name)}</summary>"
        yield f"<pre>{text}</pre></details>"
    yield "</body></html>"


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<details><summary><b>{method.upper()}</b><code>{escape(path)}</code></summary>"
    yield f"<p>{escape(operation.get('description', ''))}</p>"
    rows = {f"{one['name']} ({one['in']})": json.dumps(one["schema"])
            for one in operation.get("parameters", ())}  # fmt: skip
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        fields = content["schema"]["properties"]
        yield f"<h3>Body: {escape(kind)}</h3>"
        yield _table({name: field.get("description", "") for name, field in fields.items()})
        yield f"<pre>{escape(json.dumps(content['example'], indent=2))}</pre>"
    if rows:
        yield f"<h3>Parameters</h3>{_table(rows)}"
    answers = {status: f"{one['description']} {' '.join(one.get('content', ()))}"
               for status, one in operation["responses"].items()}  # fmt: skip
    yield f"<h3>Answers</h3>{_table(answers)}</details>"


def _table(rows: Mapping[str, str]) -> str:
    cells = (
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(text)}</td></tr>"
        for name, text in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"
