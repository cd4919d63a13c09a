"""The page's files without a browser: protocol, policy, sizes, and how they are served."""

import itertools
import json
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from vllm_omni.diffusion.utils.scenes import SCENES
from vllm_omni.entrypoints.server.protocol import protocol_schema
from vllm_omni.entrypoints.server.web_page import MEDIA_TYPES, web_page_routes

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

TEXTS = {
    entry.name: entry.read_text()
    for entry in (files("vllm_omni.entrypoints.server") / "static").iterdir()
    if entry.is_file() and entry.name != "__init__.py"
}
SCRIPTS = {name: text for name, text in TEXTS.items() if name.endswith(".js")}


@pytest.fixture
def client():
    return TestClient(Starlette(routes=web_page_routes()))


def table(name: str) -> dict:
    """A message table of protocol.js, which is written as JSON."""
    found = re.search(rf"export const {name} = (\{{.*?\n\}});", TEXTS["protocol.js"], re.DOTALL)
    return json.loads(found[1])


class TestProtocol:
    def test_every_message_and_field_is_in_the_schema(self):
        schema = protocol_schema()
        for side, name in (("CLIENT", "ClientMessage"), ("SERVER", "ServerMessage")):
            by_type = {
                entry["properties"]["type"]["const"]: entry
                for entry in members(schema, schema["$defs"][name])
            }
            for message, fields in table(side).items():
                assert message in by_type
                for field, inner in fields.items():
                    assert_known(schema, by_type[message], [message, field], inner)

    def test_the_check_sees_unknown_fields(self):
        schema = protocol_schema()
        with pytest.raises(AssertionError, match=r"session\.stop\.reason"):
            assert_known(schema, schema["$defs"]["SessionStop"], ["session.stop", "reason"], None)

    def test_only_one_file_reads_or_writes_messages(self):
        for name, text in SCRIPTS.items():
            if name in {"protocol.js", "steering.js"}:
                # steering.js compares two velocities as text; it has no socket.
                continue
            assert "JSON." not in text, name
        senders = [name for name, text in SCRIPTS.items() if ".send(" in text]
        assert senders == ["session.js"]
        calls = re.findall(r"\.send\((\w+)", SCRIPTS["session.js"])
        assert set(calls) == {"encode", "message"}


def members(schema: dict, entry: dict) -> list[dict]:
    """Alternatives of a schema entry, references followed."""
    if "$ref" in entry:
        entry = schema["$defs"][entry["$ref"].rsplit("/", 1)[1]]
    options = entry.get("oneOf") or entry.get("anyOf")
    return [one for option in options for one in members(schema, option)] if options else [entry]


def assert_known(schema: dict, entry: dict, path: list[str], inner: dict | None) -> None:
    """Assert that the last name of a path is a property of an entry, and so on inside it."""
    options = members(schema, entry)
    found = [
        option.get("properties", {}).get(path[-1])
        # A map of free names, as multi_modal_data is, has a schema for all of its values.
        or (option["additionalProperties"] if option.get("additionalProperties") else None)
        for option in options
    ]
    found = [one for one in found if one is not None]
    assert found, f"{'.'.join(path)} is not in the schema"
    if inner is None or found == [True]:
        return
    for field, deeper in inner.items():
        if any("type" not in option for one in found for option in members(schema, one)):
            continue  # any JSON value is allowed from here on
        assert_known(schema, {"anyOf": found}, [*path, field], deeper)


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.elements = []
        self.feed(TEXTS["index.html"])

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))


def contrast(ink: str, paper: str) -> float:
    """Contrast ratio of two colours as WCAG defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(ink), luminance(paper)))
    return (lighter + 0.05) / (darker + 0.05)


class TestFiles:
    def test_contrast_of_black_and_white(self):
        assert contrast("#000000", "#ffffff") == pytest.approx(21)
        assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)

    def test_no_inline_script_style_or_handler(self):
        for tag, attributes in _Page().elements:
            assert not any(name == "style" or name.startswith("on") for name in attributes), tag
            assert tag != "style"
            assert tag != "script" or attributes["src"] == "static/main.js"

    def test_every_reference_is_relative_and_exists(self):
        for tag, attributes in _Page().elements:
            for name in ("src", "href"):
                address = attributes.get(name)
                if address is None:
                    continue
                assert re.fullmatch(r"(static|scenes)/[\w./?=&]+", address), (tag, address)
                if address.startswith("static/"):
                    assert address.removeprefix("static/") in TEXTS
        for name, text in SCRIPTS.items():
            for target in re.findall(r'from "(.+?)"', text):
                assert target.removeprefix("./") in SCRIPTS, (name, target)

    def test_scenes_on_offer_are_the_toy_worlds(self):
        tiles = [a for _, a in _Page().elements if "data-scene" in a]
        offered = {tile["data-scene"]: tile["data-prompt"] for tile in tiles}
        assert offered == {name: scene.prompt for name, scene in SCENES.items()}

    def test_elements_looked_up_exist(self):
        ids = [a["id"] for _, a in _Page().elements if "id" in a]
        assert len(ids) == len(set(ids))
        listed = re.search(r"fromEntries\(\s*\[(.*?)\]", TEXTS["view.js"], re.DOTALL)[1]
        wanted = re.findall(r'"([\w-]+)"', listed)
        wanted += re.findall(r'(?:element|figure)\("([\w-]+)"', TEXTS["live.js"])
        assert set(wanted) <= set(ids)

    @pytest.mark.parametrize("name", sorted(TEXTS))
    def test_size_and_habits(self, name):
        text = TEXTS[name]
        assert len(text.splitlines()) <= 400
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
        assert not re.search(r"innerHTML|insertAdjacentHTML|\beval\b|document\.write", text)

    @pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
    def test_texts_have_contrast(self, theme):
        """WCAG 2.2, success criterion 1.4.3: 4.5 to 1 for texts."""
        blocks = re.findall(r":root \{(.*?)\n *\}", TEXTS["style.css"], re.DOTALL)
        colours = {}
        for block in blocks[: theme + 1]:
            colours |= dict(re.findall(r"--([\w-]+): (#\w{6});", block))
        pairs = [
            *itertools.product(["text", "muted", "bad", "late"], ["page", "panel", "field"]),
            ("on-accent", "accent"), ("on-glass", "stage"),
        ]  # fmt: skip
        for ink, paper in pairs:
            assert contrast(colours[ink], colours[paper]) >= 4.5, (ink, paper)

    @pytest.mark.parametrize("name", sorted(SCRIPTS))
    def test_functions_are_short(self, name):
        """A top-level or class-level block ends at its own indentation."""
        lines = SCRIPTS[name].splitlines()
        for indent in ("", "  "):
            start = None
            for number, line in enumerate(lines):
                opening = re.match(rf"{indent}(?! )(?!class|export class).*\{{$", line)
                if (
                    opening
                    and start is None
                    and "{" in line
                    and not line.startswith("export const")
                ):
                    start = number
                elif start is not None and re.match(rf"{indent}\}}", line):
                    assert number - start < 60, f"{name}:{start + 1}"
                    start = None


class TestServing:
    def test_index_with_a_strict_policy(self, client):
        response = client.get("/")
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"

    @pytest.mark.parametrize("name", sorted(set(TEXTS) - {"index.html"}))
    def test_static_file_is_revalidated(self, client, name):
        response = client.get(f"/static/{name}")
        assert response.text == TEXTS[name]
        assert response.headers["content-type"] == MEDIA_TYPES[name[name.rfind(".") :]]
        assert response.headers["cache-control"] == "no-cache"
        known = {"If-None-Match": f'"other", {response.headers["etag"]}'}
        again = client.get(f"/static/{name}", headers=known)
        assert (again.status_code, again.content) == (304, b"")

    @pytest.mark.parametrize(
        "path",
        ["/static/../web_page.py", "/static/%2e%2e/web_page.py", "/static/..%2fweb_page.py",
         "/static/", "/static/missing.js", "/static/__init__.py",
         "/static//etc/passwd", "/scenes/moon.png", "/scenes/..%2fday.png"],
    )  # fmt: skip
    def test_nothing_else_is_served(self, client, path):
        response = client.get(path)
        assert response.status_code == 404
        assert "import" not in response.text

    def test_scene_at_a_size(self, client):
        response = client.get("/scenes/day.png?width=64&height=48")
        assert response.headers["content-type"] == "image/png"
        assert response.content[:8] == b"\x89PNG\r\n\x1a\n"
        assert response.content[16:24] == (64).to_bytes(4) + (48).to_bytes(4)

    @pytest.mark.parametrize(
        ("query", "words"),
        [("width=-16", "whole number"), ("width=abc", "whole number"),
         ("width=100", "multiple of 16"), ("height=0", "multiple of 16"),
         ("height=4096", "at most 2048"), ("width=99999999999", "whole number"),
         ("width=%C2%B2", "whole number")],
    )  # fmt: skip
    def test_scene_of_a_bad_size_is_refused_in_words(self, client, query, words):
        response = client.get(f"/scenes/day.png?{query}")
        assert response.status_code == 400
        assert words in response.text
