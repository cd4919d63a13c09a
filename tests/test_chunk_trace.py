"""The page that leads a reader through one chunk names every file that a steady chunk runs.

A WebSocket session of the tiny checkpoint is served in this process, with one key press; what it
runs is seen from outside, by a profile function in all threads.
"""

import re
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from tests.helpers.http_server import running_server, tiny_deployment
from tests.helpers.socket_client import camera_event, socket_client, start_message
from vllm_omni.diffusion.executor.inline import InlineExecutor

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vllm_omni"
PAGE = ROOT / "docs" / "architecture.md"
HEADING = "## A chunk, file by file"
TRACED = ("engine/", "diffusion/", "experimental/")
FIRST_STEADY_CHUNK = 3
"""The tiny window is full, the condition no longer changes."""
CHUNKS = 6
MOST_FILES, MOST_LINES = 20, 3_700
"""What a reader has to open to follow a chunk without a gap."""


class Trace:
    """Files of the package that ran while ``recording``."""

    def __init__(self) -> None:
        self.recording = False
        self.files: set[str] = set()

    def note(self, frame: FrameType, event: str, _argument: object) -> None:
        if self.recording and event == "call" and frame.f_code.co_name != "<module>":
            path = frame.f_code.co_filename
            if path.startswith(f"{PACKAGE}/"):
                self.files.add(path.removeprefix(f"{PACKAGE}/"))

    @contextmanager
    def installed(self):
        """In this thread and in those that start meanwhile."""
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


async def traced_files() -> list[str]:
    trace = Trace()
    config = tiny_deployment().config
    with trace.installed():
        async with (
            running_server(lambda: InlineExecutor(config)) as server,
            socket_client(
                f"ws://{server.http.base_url.netloc.decode()}/v1/realtime/video"
            ) as client,
        ):
            await client.say(start_message(num_frames=9 + 12 * (CHUNKS - 1)))
            for _ in range(FIRST_STEADY_CHUNK):
                await client.chunk()
            trace.recording = True
            await client.say(camera_event("forward"))
            for _ in range(CHUNKS - FIRST_STEADY_CHUNK):
                await client.chunk()
            trace.recording = False
            await client.rest()
    return sorted(name for name in trace.files if name.startswith(TRACED))


def listed_files() -> tuple[list[str], list[str]]:
    """The files of the page: those to read, in order, and those marked as details."""
    section = PAGE.read_text().partition(f"{HEADING}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+|detail) \| `([\w/]+\.py)` \|", section, re.MULTILINE)
    to_read = [name for number, name in rows if number != "detail"]
    return to_read, [name for number, name in rows if number == "detail"]


async def test_every_file_of_a_steady_chunk_is_on_the_page():
    ran = await traced_files()
    to_read, details = listed_files()
    page = PAGE.name
    mend = [
        f"{page}: add a numbered row or a `detail` row for `{name}`, which a steady chunk runs"
        for name in ran
        if name not in {*to_read, *details}
    ]
    mend += [
        f"{page}: remove the row of `{name}`, which no steady chunk runs"
        for name in (*to_read, *details)
        if name.startswith(TRACED) and name not in ran
    ]
    assert mend == [], "\n" + "\n".join(mend)


def test_a_chunk_can_be_read_in_one_sitting():
    to_read, details = listed_files()
    assert to_read, f"{PAGE} has no rows below {HEADING!r}"
    assert len({*to_read, *details}) == len(to_read) + len(details)
    lines = sum(len((PACKAGE / name).read_text().splitlines()) for name in to_read)
    assert len(to_read) <= MOST_FILES
    assert lines <= MOST_LINES, f"{lines} lines are too many: make rows details, or files shorter"
