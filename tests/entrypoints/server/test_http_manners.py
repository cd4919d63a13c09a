"""What any HTTP client may expect: HEAD, one shape of errors, ids of requests, no field twice."""

import base64
import json
import re
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.helpers.local_server import MODEL, LocalServer, local_server
from tests.helpers.socket_client import picture_url, socket_client, start_message
from vllm_omni.config.server import ServerConfig
from vllm_omni.errors import ConfigError, InvalidRequestError
from vllm_omni.inputs.picture import load_image

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

PAGE = "https://page.example"
BODY = {name: value for name, value in start_message().items() if name != "type"}
VIDEOS = "/v1/videos"
SHAPE = {"message", "type", "param", "code", "request_id"}


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    config = ServerConfig((MODEL,), allowed_origins=(PAGE,))
    with local_server(config=config) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: LocalServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.address, timeout=30, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def finished(http: httpx.Client) -> str:
    """A job that is completed."""
    made = http.post(VIDEOS, json=BODY).json()["id"]
    while http.get(f"{VIDEOS}/{made}").json()["status"] != "completed":
        pass
    return made


def error_of(answer: httpx.Response) -> dict:
    error = answer.json()["error"]
    assert set(error) == SHAPE
    assert error["code"] == answer.status_code
    assert error["request_id"] == answer.headers["X-Request-Id"]
    return error


class TestHead:
    @pytest.mark.parametrize(
        "path",
        ["/health", "/ping", "/version", "/load", "/metrics", "/v1/models", "/", "/docs",
         "/v1/realtime/capabilities", "/openapi.json", VIDEOS, "/static/page.css"],
    )  # fmt: skip
    def test_it_has_the_head_of_get_and_no_body(self, http, path):
        got, asked = http.get(path), http.head(path)
        assert (asked.status_code, asked.content) == (got.status_code, b"")
        if path not in {"/metrics", "/v1/models"}:  # They differ from one time to the next.
            assert asked.headers.get("content-length") == got.headers.get("content-length")

    def test_of_a_job_and_its_video(self, http, finished):
        for path in (f"{VIDEOS}/{finished}", f"{VIDEOS}/{finished}/content"):
            asked = http.head(path)
            assert (asked.status_code, asked.content) == (200, b"")
            assert int(asked.headers["content-length"]) == len(http.get(path).content)

    def test_of_nothing(self, http):
        assert http.head("/v1/videos/none").status_code == 404


class TestErrors:
    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [("GET", "/nothing", 404), ("GET", "/v1/videos/none", 404), ("PUT", "/health", 405),
         ("POST", "/v1/models", 405), ("GET", "/v1/videos?limit=101", 422),
         ("GET", "/v1/videos?order=up", 422), ("GET", "/v1/videos?limit=%00", 422),
         ("GET", "/static/none.js", 404), ("GET", "/scenes/day.png?width=x", 400),
         ("POST", "/v1/videos", 415), ("DELETE", "/v1/videos/none", 404),
         ("GET", "/v1/videos?limit=1&limit=2", 400), ("GET", "/v1/videos/%00%0d%0a%1b", 404)],
    )  # fmt: skip
    def test_all_have_one_shape(self, http, method, path, status):
        answer = http.request(method, path)
        assert answer.status_code == status
        error_of(answer)

    def test_the_methods_of_a_route_are_told(self, http):
        answer = http.put("/v1/videos/none/content")
        assert set(answer.headers["Allow"].split(", ")) == {"GET", "HEAD"}
        assert "GET" in error_of(answer)["message"]

    @pytest.mark.parametrize("bad", ["bytes=9999999999-", "bytes=a-b", "pages=1-2"])
    def test_a_range_that_is_none(self, http, finished, bad):
        answer = http.get(f"{VIDEOS}/{finished}/content", headers={"Range": bad})
        assert answer.status_code in {400, 416}
        error_of(answer)
        if answer.status_code == 416:
            assert re.fullmatch(r"bytes \*/\d+", answer.headers["Content-Range"])

    def test_a_page_that_may_not_ask(self, http):
        asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        error_of(http.options(VIDEOS, headers=asked))

    def test_a_parameter_is_named(self, http):
        error = error_of(http.get(f"{VIDEOS}?limit=none"))
        assert error["param"] == "limit"
        assert error["message"] == 'limit: must be an integer, got "none"'


def answered(server: LocalServer, request: bytes) -> bytes:
    """Everything that comes for bytes of a request until the server ends the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(65536), b""))


class TestTargets:
    """A client of a proxy writes the server's name before the path, and that one counts."""

    @pytest.mark.parametrize("scheme", [b"http", b"HTTP", b"https"])
    def test_one_with_the_name_of_the_server(self, server, scheme):
        target = scheme + b"://localhost:1/v1/models?a=b"
        request = b"GET %s HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n" % target
        got = answered(server, request)
        assert got.startswith(b"HTTP/1.1 200 ")
        assert b'"object":"list"' in got

    def test_one_with_another_name(self):
        with local_server(config=ServerConfig((MODEL,), host="127.0.0.1")) as server:
            got = answered(
                server,
                b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\n"
                b"Connection: close\r\n\r\n",
            )
        assert got.startswith(b"HTTP/1.1 403 ")
        assert b"not known as evil.example" in got

    def test_a_body_whose_end_is_told_twice_is_refused_and_ends_the_connection(self, server):
        got = answered(
            server,
            b"POST /v1/videos/sync HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        )
        assert got.startswith(b"HTTP/1.1 400 ")
        assert b"both Content-Length and Transfer-Encoding" in got

    @pytest.mark.parametrize("limit", ["1_0", "+5", " 5", "5.0", "\u0665", "0x5", ""])
    def test_a_number_is_written_in_digits(self, http, limit):
        answer = http.get(VIDEOS, params={"limit": limit})
        assert answer.status_code == 422
        assert answer.json()["error"]["param"] == "limit"
        assert http.get(VIDEOS, params={"limit": "05"}).status_code == 200


class TestKeys:
    @pytest.fixture(scope="class")
    def keyed(self) -> Iterator[httpx.Client]:
        config = ServerConfig((MODEL,), api_keys=("a key-1", "clé"))
        with local_server(config=config) as running, httpx.Client(base_url=running.address) as one:
            yield one

    @pytest.mark.parametrize(
        "value",
        [b"Bearer a key-1", b"bearer a key-1", b"BEARER   a key-1", "Bearer clé".encode(),
         "bearer clé".encode("latin-1")],
    )  # fmt: skip
    def test_any_case_of_the_scheme(self, keyed, value):
        assert keyed.get("/v1/models", headers={"Authorization": value}).status_code == 200

    @pytest.mark.parametrize(
        "value", [b"a key-1", b"Basic a key-1", b"Bearera key-1", b"Bearer", b""]
    )
    def test_no_other_scheme_and_none(self, keyed, value):
        answer = keyed.get("/v1/models", headers={"Authorization": value})
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        error_of(answer)

    def test_not_two(self, keyed):
        twice = [("Authorization", "Bearer a key-1"), ("Authorization", "Bearer a key-1")]
        assert keyed.get("/v1/models", headers=twice).status_code == 401

    @pytest.mark.parametrize("odd", ["\n", "\t", "\x00", "\udc80", "\x7f", "\u2028"])
    def test_one_that_no_header_can_carry_is_refused_at_the_start(self, odd):
        for key in (f"sec{odd}ret", f"{odd}secret", f"secret{odd}"):
            with pytest.raises(ConfigError, match="--api-key") as refused:
                ServerConfig((MODEL,), api_keys=("good", key))
            assert "ret" not in str(refused.value)

    @pytest.mark.parametrize("key", [" secret", "secret ", " "])
    def test_nor_one_between_spaces(self, key):
        with pytest.raises(ConfigError, match="--api-key: key 1 "):
            ServerConfig((MODEL,), api_keys=(key,))


class TestRequestIds:
    @pytest.mark.parametrize("given", ["abc", "0", "a" * 128, "trace/7;x=%41"])
    def test_a_good_one_is_given_back(self, http, given):
        for path, status in (("/ping", 200), ("/nothing", 404), ("/v1/videos/none", 404)):
            answer = http.get(path, headers={"X-Request-Id": given})
            assert (answer.status_code, answer.headers["X-Request-Id"]) == (status, given)
        refused = http.post(VIDEOS, json={"prompt": ""}, headers={"X-Request-Id": given})
        assert error_of(refused)["request_id"] == given

    @pytest.mark.parametrize("given", [b"", b"a b", b"a" * 129, "é".encode(), b"\x1b[31m"])
    def test_another_is_replaced(self, http, given):
        told = http.get("/ping", headers={"X-Request-Id": given}).headers["X-Request-Id"]
        assert re.fullmatch("[0-9a-f]{32}", told)

    def test_each_request_has_its_own(self, http):
        ids = {http.get("/ping").headers["X-Request-Id"] for _ in range(5)}
        assert len(ids) == 5

    def test_a_video_is_named_by_it_in_the_log(self, http, caplog):
        caplog.set_level("INFO", "vllm_omni")
        answer = http.post(f"{VIDEOS}/sync", json=BODY, headers={"X-Request-Id": "mine"})
        assert (answer.status_code, answer.headers["X-Request-Id"]) == (200, "mine")
        assert "video_sync-mine" in caplog.text

    def test_a_job_keeps_a_name_of_its_own(self, http, caplog):
        caplog.set_level("INFO", "vllm_omni")
        made = [http.post(VIDEOS, json=BODY, headers={"X-Request-Id": "mine"}) for _ in range(2)]
        first, second = (answer.json()["id"] for answer in made)
        assert first != second
        assert f"{first} is the result of request mine" in caplog.text
        unnamed = http.post(VIDEOS, json=BODY)
        assert unnamed.headers["X-Request-Id"] == unnamed.json()["id"]

    @pytest.mark.parametrize("given", [{}, {"X-Request-Id": "mine"}])
    async def test_a_socket_is_named_by_it(self, server, given):
        async with socket_client(server.url, additional_headers=given) as client:
            told = client.socket.response.headers["X-Request-Id"]
            await client.say(start_message())
            named = (await client.expect("video.start"))["request_id"]
            await client.rest()
        assert named == (told if not given else "video_stream-mine")
        assert told == given.get("X-Request-Id", told)


class TestFields:
    @pytest.mark.parametrize("field", ["prompt", "seed", "input_reference", "unknown"])
    def test_none_twice_in_a_form(self, http, field):
        parts = [("prompt", (None, "x")), (field, (None, "1")), (field, (None, "1"))]
        answer = http.post(VIDEOS, files=parts)
        assert answer.status_code == 400
        assert error_of(answer)["param"] == field

    @pytest.mark.parametrize(
        "body",
        ['{"prompt": "a", "prompt": "a"}', '{"prompt": "a", "extra_params": {"x": 1, "x": 1}}',
         '{"\\u0070rompt": "a", "prompt": "b"}'],
    )  # fmt: skip
    def test_none_twice_in_json(self, http, body):
        answer = http.post(VIDEOS, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert error_of(answer)["param"] in {"prompt", "x"}

    async def test_none_twice_on_a_socket(self, server):
        async with socket_client(server.url) as client:
            await client.say(json.dumps(start_message())[:-1] + ', "prompt": "another"}')
            error = await client.expect("error")
        assert (error["code"], error["message"]) == ("invalid_request", "prompt: is given twice")

    @pytest.mark.parametrize("names", [("colour",), ("a b", "ä\r\nX: y"), tuple("abcdefghijklm")])
    def test_unknown_ones_are_told(self, http, names, caplog):
        answer = http.post(VIDEOS, json=BODY | dict.fromkeys(names, "x"))
        assert answer.status_code == 200
        assert answer.headers["Warning"].startswith('199 vllm-omni "unknown fields were ignored: ')
        assert "unknown fields were ignored" in caplog.text
        assert "\r" not in caplog.text

    def test_known_ones_are_not(self, http):
        assert "Warning" not in http.post(VIDEOS, json=BODY).headers

    def test_half_a_character_in_a_name_is_refused(self, http):
        body = json.dumps(BODY | {"\ud83d": 1})
        answer = http.post(VIDEOS, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in {400, 422}
        error_of(answer)

    @pytest.mark.parametrize("field", ["prompt", "model", "user", "size", "seed", "quality"])
    def test_nul_is_no_fault_of_the_server(self, http, field):
        answer = http.post(VIDEOS, json=BODY | {field: "a\x00\x1b[31m\r\nX: y"})
        assert answer.status_code in {200, 400, 422}

    def test_seconds_work_and_the_answer_tells_the_length(self, http):
        asked = {name: value for name, value in BODY.items() if name not in {"num_frames", "fps"}}
        job = http.post(VIDEOS, data={**asked, "seconds": "4", "image_reference": json.dumps(
            asked["image_reference"])}).json()  # fmt: skip
        assert (job["num_frames"], job["fps"], job["duration_s"]) == (69, 16, 69 / 16)
        answer = http.post(f"{VIDEOS}/sync", json=asked | {"seconds": "1"})
        assert (answer.headers["X-Num-Frames"], answer.headers["X-Fps"]) == ("21", "16")


@pytest.mark.parametrize("ending", ["\n", "\r\n", " ", "\t\n"])
def test_base64_in_lines_is_the_same_picture(ending):
    head, _, code = picture_url().partition(",")
    lines = ending.join(code[place : place + 76] for place in range(0, len(code), 76))
    assert (load_image(f"{head},{lines}").rgb == load_image(picture_url()).rgb).all()


@pytest.mark.parametrize("code", ["é", "=\n=", "ab\u2028cd!", "a\x00b="])
def test_what_is_no_base64_is_not(code):
    with pytest.raises(InvalidRequestError, match="base64"):
        load_image(f"data:image/png;base64,{base64.b64encode(b'xy').decode()}{code}")
