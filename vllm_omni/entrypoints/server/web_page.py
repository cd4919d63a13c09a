"""Serves the web page: static files with a strict content policy, and pictures of the scenes."""

import hashlib
import io
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.utils.scenes import SCENES, first_picture
from vllm_omni.entrypoints.server.http_errors import error_answer
from vllm_omni.errors import InvalidRequestError

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = "; ".join([
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' blob:",
    "media-src 'self' blob:",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
])  # fmt: skip
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), gamepad=(self)",
}
DEFAULT_SCENE_SIZE = (480, 832)
MAX_SCENE_SIDE = 2048


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file of the page, held in memory."""

    body: bytes
    media_type: str
    etag: str


def web_page_routes() -> list[Route]:
    """Routes of the page: ``/``, ``/static/NAME`` and ``/scenes/NAME.png``.

    Files are read once, here, and looked up by their whole name afterwards, so a request never
    touches the file system. They are revalidated by every visit (a strong ETag, no age), so a
    page never mixes files of two versions.
    """
    static = _read_static_files()
    index = static.pop("index.html")

    async def page(request: Request) -> Response:
        return _answer(request, index)

    async def static_file(request: Request) -> Response:
        found = static.get(request.path_params["name"])
        return _not_found() if found is None else _answer(request, found)

    return [
        Route("/", page, include_in_schema=False),
        Route("/static/{name}", static_file, include_in_schema=False),
        Route("/scenes/{name}.png", _scene, include_in_schema=False),
    ]


def _read_static_files() -> dict[str, StaticFile]:
    found = {}
    for entry in (files("vllm_omni.entrypoints.server") / "static").iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if entry.is_file() and suffix in MEDIA_TYPES:
            body = entry.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            found[entry.name] = StaticFile(body, MEDIA_TYPES[suffix], etag)
    return found


def _answer(request: Request, file: StaticFile) -> Response:
    headers = SECURITY_HEADERS | {"Cache-Control": "no-cache", "ETag": file.etag}
    known = [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.media_type, headers=headers)


# Not a coroutine: it runs in a worker thread, for painting takes from milliseconds to seconds.
def _scene(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in SCENES:
        return _not_found()
    try:
        height, width = _scene_size(request)
    except InvalidRequestError as error:
        return error_answer(400, str(error), field=error.field, headers=SECURITY_HEADERS)
    headers = SECURITY_HEADERS | {"Cache-Control": "max-age=86400"}
    return Response(_scene_png(name, height, width), media_type="image/png", headers=headers)


def _scene_size(request: Request) -> tuple[int, int]:
    sides = []
    for name, default in zip(("height", "width"), DEFAULT_SCENE_SIZE, strict=True):
        text = request.query_params.get(name, str(default))
        if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_SCENE_SIDE))):
            raise InvalidRequestError(f"must be a whole number, got {text!r:.20}", field=name)
        if int(text) > MAX_SCENE_SIDE:
            raise InvalidRequestError(f"must be at most {MAX_SCENE_SIDE}, got {text}", field=name)
        sides.append(int(text))
    VideoGeometry(height=sides[0], width=sides[1])
    return sides[0], sides[1]


@lru_cache(maxsize=16)
def _scene_png(name: str, height: int, width: int) -> bytes:
    target = io.BytesIO()
    first_picture(name, height=height, width=width).save(target, "PNG")
    return target.getvalue()


def _not_found() -> Response:
    return error_answer(404, "Not Found", headers=SECURITY_HEADERS)
