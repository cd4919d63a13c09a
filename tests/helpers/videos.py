"""Requests for videos over HTTP, and the server that answers them on a fake executor."""

import asyncio
import base64
import io
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
from PIL import Image

from tests.helpers.http_server import Running

URL = "/v1/videos"
SYNC = f"{URL}/sync"


def picture(seed: int = 0) -> bytes:
    """A PNG of noise."""
    rgb = np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(rgb).save(file, "PNG")
    return file.getvalue()


PICTURE = picture()
DATA_URL = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
FORM = {"prompt": "a quiet harbour", "width": "96", "height": "64", "num_frames": "21", "seed": "3"}
FILES = {"input_reference": ("first.png", PICTURE, "image/png")}
BODY = {
    "prompt": "a quiet harbour", "size": "96x64", "num_frames": 21, "fps": 16, "seed": 3,
    "image_reference": {"image_url": DATA_URL},
}  # fmt: skip


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.01)


async def job_that_is(server: Running, video_id: str, status: str) -> dict:
    async def there() -> bool:
        return (await server.http.get(f"{URL}/{video_id}")).json()["status"] == status

    await until(there)
    return (await server.http.get(f"{URL}/{video_id}")).json()


def stored_files(storage: Path) -> list[Path]:
    return [path for path in storage.rglob("*") if path.is_file()]
