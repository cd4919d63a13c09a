"""A small HTTP server on loopback that answers pictures, redirects, and misbehaves on demand."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class PictureServer:
    """What is served and what was asked for.

    Attributes:
        requests: first line and headers of every request, as sent.
        pages: path to a whole answer; other paths hang.
    """

    pages: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    port: int = 0

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        """Address of a page by a name of this machine."""
        return f"http://{host}:{self.port}{path}"

    tasks: set[asyncio.Task] = field(default_factory=set)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and close."""
        self.tasks.add(asyncio.current_task())
        try:
            await self._answer(reader, writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.requests.append(head)
        path = head.split(" ")[1]
        if path in self.pages:
            writer.write(self.pages[path])
            await writer.drain()
        else:
            await reader.read()  # until the client gives up


def ok(body: bytes, **headers: str) -> bytes:
    """An answer of status 200."""
    lines = {"Content-Length": str(len(body)), "Content-Type": "image/png"} | headers
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
    return b"HTTP/1.1 200 OK\r\n" + head.encode() + b"\r\n" + body


def status(code: int) -> bytes:
    """An answer without a body."""
    return f"HTTP/1.1 {code} Because\r\nContent-Length: 0\r\n\r\n".encode()


def redirect(location: str) -> bytes:
    """An answer that sends the client elsewhere."""
    return f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


def compressed(body: bytes) -> bytes:
    """An answer that grows when it is read as its header says."""
    return ok(gzip.compress(body), Content_Encoding="gzip")


@asynccontextmanager
async def picture_server(pages: dict[str, bytes] | None = None) -> AsyncIterator[PictureServer]:
    """Serve until the block ends."""
    served = PictureServer(pages=pages or {})
    listener = await asyncio.start_server(served.handle, "127.0.0.1", 0)
    served.port = listener.sockets[0].getsockname()[1]
    async with listener:
        yield served
        await asyncio.gather(*served.tasks, return_exceptions=True)
