"""Pictures by URL: what is fetched, what is refused, and that nothing inside can be reached."""

import asyncio
import base64
import io
import socket
import threading
import time
import zlib

import pytest
from PIL import Image

from tests.helpers.local_server import local_server
from tests.helpers.picture_server import compressed, ok, picture_server, redirect, status
from tests.helpers.socket_client import picture_url, socket_client, start_message
from vllm_omni.entrypoints.server.image_source import ImageSource
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.picture import load_image

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

PNG = base64.b64decode(picture_url().partition(",")[2])
LOCAL = ImageSource(("127.0.0.1", "localhost"), timeout_s=5.0)
PUBLIC = ImageSource(timeout_s=5.0)


def png_header_of(width: int, height: int) -> bytes:
    """A PNG that announces a size and has next to no data."""

    def block(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data).to_bytes(4, "big")
        return len(data).to_bytes(4, "big") + kind + data + crc

    size = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\x00\x00\x00"
    pixels = zlib.compress(b"\0" * 100)
    return (
        b"\x89PNG\r\n\x1a\n" + block(b"IHDR", size) + block(b"IDAT", pixels) + block(b"IEND", b"")
    )


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


@pytest.fixture
def resolved_names(monkeypatch):
    """Host names that a test gives addresses to; others stay as they are."""
    table: dict[str, list[str]] = {}
    real = socket.getaddrinfo

    def getaddrinfo(host, port, **options):
        if host in table:
            return [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
                for address in table[host]
            ]
        return real(host, port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return table


class TestLoad:
    async def test_data_urls_pass_undecoded(self):
        assert await PUBLIC.load(picture_url()) == picture_url()

    async def test_http(self):
        async with picture_server({"/a.png": ok(PNG)}) as server:
            assert await LOCAL.load(server.url("/a.png")) == PNG
            assert await LOCAL.load(server.url("/a.png", "localhost")) == PNG
        # The name is kept for the server although the address was looked up before.
        assert f"Host: localhost:{server.port}" in server.requests[1]

    async def test_the_environment_adds_nothing(self, monkeypatch, tmp_path):
        netrc = tmp_path / "netrc"
        netrc.write_text("default login operator password secret\n")
        netrc.chmod(0o600)
        monkeypatch.setenv("NETRC", str(netrc))
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        async with picture_server({"/a.png": ok(PNG)}) as server:
            assert await LOCAL.load(server.url("/a.png")) == PNG
        assert "authorization" not in server.requests[0].lower()

    @pytest.mark.parametrize(
        "url",
        ["ftp://h/a.png", "file:///etc/passwd", "/etc/passwd", "", "gopher://x", "javascript:1"],
    )
    async def test_other_schemes(self, url):
        with pytest.raises(InvalidRequestError, match=r"must be a data: or http\(s\) URL"):
            await PUBLIC.load(url)

    @pytest.mark.parametrize(
        "url",
        ["http://", "http:///a.png", "http://" + "a" * 80 + ".example/", "http://h:99999999/",
         "http://exa mple/", "http://[::1/", "http://\u2603.invalid/", "http://a..b/",
         "http://xn--zzzz--/a.png", "http://xn--a/", "http://xn--.example/", "http://1.1.1.1:0/",
         "http://1.1.1.1:65536/a.png", "https://[2606:4700::1111]:99999/"],
    )  # fmt: skip
    async def test_senseless_urls(self, url):
        with pytest.raises(InvalidRequestError):
            await PUBLIC.load(url)

    @pytest.mark.parametrize("code", [204, 404, 500])
    async def test_the_server_refuses(self, code):
        async with picture_server({"/a": status(code)}) as server:
            with pytest.raises(InvalidRequestError, match=f"answered {code}"):
                await LOCAL.load(server.url("/a"))

    async def test_nobody_listens(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        with pytest.raises(InvalidRequestError, match="cannot be fetched"):
            await LOCAL.load(f"http://127.0.0.1:{port}/a")

    @pytest.mark.timing
    async def test_a_server_that_does_not_answer(self):
        impatient = ImageSource(("127.0.0.1",), timeout_s=0.3)
        async with picture_server() as server:
            began = time.monotonic()
            with pytest.raises(InvalidRequestError, match="did not answer within"):
                await impatient.load(server.url("/hang"))
            assert time.monotonic() - began < 5

    async def test_a_content_that_never_ends(self, monkeypatch):
        monkeypatch.setattr("vllm_omni.entrypoints.server.image_source._MAX_BYTES", 10_000)
        async with picture_server({"/big": ok(b"x" * 10_001)}) as server:
            with pytest.raises(InvalidRequestError, match="larger than 10000 bytes"):
                await LOCAL.load(server.url("/big"))

    async def test_compressed_content_is_not_unpacked(self):
        bomb = compressed(bytes(10**7))
        async with picture_server({"/bomb": bomb}) as server:
            content = await LOCAL.load(server.url("/bomb"))
        assert len(content) < 20_000
        assert "accept-encoding: identity" in server.requests[0].lower()
        with pytest.raises(InvalidRequestError):
            load_image(content)


class TestAddresses:
    @pytest.mark.parametrize(
        "host",
        ["127.0.0.1", "localhost", "0.0.0.0", "10.0.0.1", "192.168.1.1", "169.254.169.254",
         "172.16.0.1", "100.64.0.1", "[::1]", "[::ffff:127.0.0.1]", "[fe80::1]", "[fd00::1]",
         "2130706433", "0x7f000001", "127.1"],
    )  # fmt: skip
    async def test_what_is_not_public_is_refused(self, host):
        with pytest.raises(InvalidRequestError, match=r"not public|not known|cannot be fetched"):
            await PUBLIC.load(f"http://{host}/a.png")

    async def test_a_public_name_of_a_private_address(self, resolved_names):
        resolved_names["pictures.example"] = ["127.0.0.1"]
        async with picture_server({"/a.png": ok(PNG)}) as server:
            with pytest.raises(InvalidRequestError, match="not public"):
                await PUBLIC.load(server.url("/a.png", "pictures.example"))
        assert server.requests == []

    async def test_one_private_address_among_public_ones_is_enough(self, resolved_names):
        resolved_names["pictures.example"] = ["1.1.1.1", "10.0.0.1"]
        with pytest.raises(InvalidRequestError, match="not public"):
            await PUBLIC.load("http://pictures.example/a.png")

    async def test_the_address_that_was_checked_is_the_one_that_is_asked(self, resolved_names):
        # The second look-up of a name would find another machine: there is none.
        async with picture_server({"/a.png": ok(PNG)}) as server:
            resolved_names["pictures.example"] = ["127.0.0.1"]
            allowing = ImageSource(("pictures.example",), timeout_s=5.0)
            assert await allowing.load(server.url("/a.png", "pictures.example")) == PNG

    async def test_names_that_are_found_slowly_hold_up_nobody_else(self, monkeypatch):
        found, asked = threading.Event(), threading.Semaphore(0)

        def slow(*_arguments, **_options):
            asked.release()
            assert found.wait(60)
            raise OSError

        monkeypatch.setattr(socket, "getaddrinfo", slow)
        fetches = [asyncio.create_task(PUBLIC.load(f"http://n{n}.example/")) for n in range(40)]
        while not asked.acquire(blocking=False):
            await asyncio.sleep(0.01)
        # Without threads of their own the 40 would hold all that the event loop has for others.
        await asyncio.gather(*(asyncio.to_thread(int) for _ in range(40)))
        assert not any(fetch.done() for fetch in fetches)
        found.set()
        outcomes = await asyncio.gather(*fetches, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {InvalidRequestError}

    async def test_allowed_hosts_are_the_only_ones(self, resolved_names):
        resolved_names["other.example"] = ["1.1.1.1"]
        with pytest.raises(InvalidRequestError, match="--allowed-media-domains"):
            await LOCAL.load("http://other.example/a.png")


class TestRedirects:
    async def test_it_follows(self):
        async with picture_server({"/b.png": ok(PNG), "/a": redirect("/b.png")}) as server:
            assert await LOCAL.load(server.url("/a")) == PNG

    async def test_where_to_is_checked_again(self, resolved_names):
        # The first host is allowed, the second is inside and is not.
        resolved_names["front.example"] = ["127.0.0.1"]
        front = ImageSource(("front.example",), timeout_s=5.0)
        async with picture_server({"/secret": ok(PNG)}) as server:
            server.pages["/a"] = redirect(server.url("/secret"))
            with pytest.raises(InvalidRequestError, match="--allowed-media-domains"):
                await front.load(server.url("/a", "front.example"))
        assert len(server.requests) == 1

    async def test_a_redirect_to_a_private_address_is_refused(self, monkeypatch):
        checked: list[str] = []
        original = ImageSource._checked_address

        async def first_host_is_public(self, target):
            checked.append(target.host)
            return "127.0.0.1" if len(checked) == 1 else await original(self, target)

        monkeypatch.setattr(ImageSource, "_checked_address", first_host_is_public)
        async with picture_server({"/secret": ok(PNG)}) as server:
            server.pages["/a"] = redirect(server.url("/secret"))
            with pytest.raises(InvalidRequestError, match="not public"):
                await PUBLIC.load(server.url("/a", "public.example"))
        assert checked == ["public.example", "127.0.0.1"]

    @pytest.mark.parametrize(
        "location",
        ["file:///etc/passwd", "ftp://h/x", "gopher://h", "\\\\host", "http://127.0.0.1:99999/",
         "http://xn--a/", "//xn--zzzz--/a.png", "http://[", "http://127.0.0.1:x/"],
    )  # fmt: skip
    async def test_other_schemes(self, location):
        async with picture_server({"/a": redirect(location)}) as server:
            with pytest.raises(InvalidRequestError):
                await LOCAL.load(server.url("/a"))

    async def test_circles_end(self):
        async with picture_server({"/a": redirect("/a")}) as server:
            with pytest.raises(InvalidRequestError, match="more than 5 redirects"):
                await LOCAL.load(server.url("/a"))
        assert len(server.requests) == 6

    async def test_they_can_be_forbidden(self, monkeypatch):
        monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
        async with picture_server({"/a": redirect("/b")}) as server:
            with pytest.raises(InvalidRequestError, match="VLLM_MEDIA_URL_ALLOW_REDIRECTS"):
                await LOCAL.load(server.url("/a"))


class TestOnTheSocket:
    async def test_a_fetched_picture_starts_a_world(self):
        async with picture_server({"/a.png": ok(PNG)}) as pictures:
            with local_server(images=LOCAL) as server:
                async with socket_client(server.url) as client:
                    reference = {"image_url": pictures.url("/a.png")}
                    await client.say(start_message(image_reference=reference))
                    assert (await client.rest())["chunks"] == 3

    async def test_a_picture_that_does_not_come_ends_the_session(self):
        impatient = ImageSource(("127.0.0.1",), timeout_s=0.3)
        async with picture_server() as pictures:
            with local_server(images=impatient) as server:
                async with socket_client(server.url) as client:
                    reference = {"image_url": pictures.url("/hang")}
                    await client.say(start_message(image_reference=reference))
                    await client.expect("video.start")
                    assert "did not answer" in (await client.expect("error"))["message"]
                    assert await client.close_code() == 1000

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (png_header_of(20_000, 20_000), "pixels"),
            (png_header_of(2**31 - 1, 2**31 - 1), ""),
            (PNG[: len(PNG) // 2], ""),
            (b"\0\0\0\x20ftypheic" + bytes(100), ""),
            (b"", ""),
            (b"GIF89a" + bytes(20), ""),
        ],
        ids=["20 000 squared", "2^31 squared", "truncated", "heic", "empty", "broken gif"],
    )
    async def test_bombs_and_broken_files_by_data_url(self, content, words):
        with local_server() as server:
            async with socket_client(server.url) as client:
                reference = {"image_url": data_url(content)}
                await client.say(start_message(image_reference=reference))
                await client.expect("video.start")
                error = await client.expect("error")
                assert words in error["message"]
                assert "Traceback" not in error["message"]
                assert "its log says why" not in error["message"]
                assert await client.close_code() == 1000
            async with socket_client(server.url) as client:
                await client.say(start_message())
                assert (await client.rest())["chunks"] == 3

    async def test_a_large_picture_is_read_and_echoed(self):
        # Most of the four million characters that a start may have.
        target = io.BytesIO()
        Image.effect_noise((1600, 1600), 90).save(target, "PNG")
        with local_server() as server:
            async with socket_client(server.url) as client:
                reference = {"image_url": data_url(target.getvalue())}
                assert 3_000_000 < len(reference["image_url"]) < 4_100_000
                await client.say(start_message(image_reference=reference))
                assert (await client.expect("video.start"))["config"][
                    "image_reference"
                ] == reference
                assert (await client.rest())["chunks"] == 3
