"""The documentation as a site: every page is led to and says for whom it is, examples run."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import av
import pytest
import yaml
from PIL import Image

from tests.helpers.pages import blocks
from tests.helpers.server import tiny_server
from tests.helpers.videos import PICTURE

__all__ = ["tiny_server"]

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
READERS = "operators|developers|users|visitors|newcomers|readers|whoever|everybody"


def led_to(entry: object) -> list[str]:
    """Pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    below = entry.values() if isinstance(entry, dict) else entry
    return [page for part in below for page in led_to(part)]


def test_the_navigation_leads_to_every_page_once():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(led_to(settings["nav"])) == PAGES


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_at_its_top_for_whom_it_is(page):
    text = re.sub(r"<!--.*?-->", "", (DOCS / page).read_text())
    _, first, *_ = re.split(r"\n\s*\n", text.strip())
    assert re.search(rf"\b[Ff]or ({READERS})\b", first), first


def test_the_page_for_those_who_switch_is_short_and_names_what_exists():
    text = (DOCS / "coming_from_vllm_omni.md").read_text()
    assert len(text.splitlines()) <= 40
    models = re.findall(r"`models/([\w/.]+)`", text)
    assert len(models) == 2
    assert [
        name for name in models if not (ROOT / "vllm_omni/diffusion/models" / name).exists()
    ] == []


with_client, with_socket = blocks(DOCS / "tasks" / "client.md", "python")
assert with_socket.count('"832x480"') == 1
CLIENTS = {
    "with the client": with_client,
    "over the socket": with_socket.replace('"832x480"', '"96x64"'),
    "in cells": (ROOT / "examples/online_serving/notebook/walk.py").read_text(),
}


@pytest.mark.parametrize("which", CLIENTS)
def test_the_clients_of_the_docs_make_a_video(tiny_server, tmp_path, monkeypatch, which):
    example = CLIENTS[which]
    assert example.count("127.0.0.1:8000") == 1
    example = example.replace("127.0.0.1:8000", f"127.0.0.1:{tiny_server.port}")
    monkeypatch.chdir(tmp_path)
    Path("first.png").write_bytes(PICTURE)
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    with av.open("world.mp4") as video:
        assert sum(1 for _ in video.decode(video=0)) == 45


def test_the_site_is_built_without_a_warning(tmp_path):
    needed = ("material", "mkdocstrings_handlers")
    if any(importlib.util.find_spec(name) is None for name in needed):
        pytest.skip("mkdocs-material or mkdocstrings is not installed; `make docs` installs them")
    run = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    html = {page: page.read_text() for page in tmp_path.rglob("*.html")}
    fetched = re.compile(r'(?:src|<link[^>]+href)="https?://')
    assert [page for page, text in html.items() if fetched.search(text)] == []
    assert (tmp_path / "search" / "search_index.js").stat().st_size > 0
    api = html[tmp_path / "reference" / "python.html"]
    for name in ("entrypoints.async_omni.AsyncOmni.abort", "client.world.WorldClient.wait_ready"):
        assert f'id="vllm_omni.{name}"' in api


def test_pictures_of_the_page_have_the_sizes_that_they_name():
    pictures = {path.stem: path for path in (DOCS / "images").glob("web_page_*")}
    sizes = ("360x640", "844x390", "1024x768", "1280x720", "1920x1080")
    assert set(pictures) == {f"web_page_{size}_{s}" for size in sizes for s in ("light", "dark")}
    for name, path in pictures.items():
        with Image.open(path) as picture:
            assert f"{picture.width}x{picture.height}" == name.split("_")[2]
    assert sum(path.stat().st_size for path in pictures.values()) < 1_000_000
