"""The routes described: ``/openapi.json`` for programs, and the page ``/docs`` without other hosts.

The routes say themselves what they answer; here is added what stands in front of all of them.
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

_KEYED = ("/v1", "/admin")
"""Where paths begin that may need a key."""
_BEARER = {
    "type": "http",
    "scheme": "bearer",
    "description": "a key of --api-key; of --admin-key below /admin",
}


def describe(routers: Iterable[APIRouter], *, title: str, needs_key: bool) -> dict[str, Any]:
    """Describe the routes of an application.

    Args:
        needs_key: whether the routes below ``/v1`` need a key.
    """
    routes = [route for router in routers for route in router.routes]
    schema = get_openapi(title=title, version=__version__, routes=routes)
    schema["components"]["securitySchemes"] = {"bearer": _BEARER}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            responses = operation["responses"]
            if path.startswith(_KEYED):
                responses["401"] = _refusal("no valid API key")
                required = needs_key or not path.startswith("/v1")
                operation["security"] = [{"bearer": []}] if required else [{}, {"bearer": []}]
            if method != "get":
                responses["403"] = _refusal("a page of another origin")
            operation["responses"] = dict(sorted(responses.items()))
    return schema


def _refusal(text: str) -> dict[str, Any]:
    error = {"schema": {"$ref": "#/components/schemas/Error"}}
    return {"description": text, "content": {"application/json": error}}


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
