"""What users of the public package bring with them and this server takes."""

import json
import socket
import ssl
from pathlib import Path

import httpx
import pytest
import yaml
from starlette.testclient import TestClient

from tests.helpers.http_server import NAME, tiny_deployment
from tests.helpers.server import real_server
from tests.helpers.socket_client import socket_client, start_message
from vllm_omni.config.server import ServerConfig
from vllm_omni.entrypoints.engine_client import EngineClient
from vllm_omni.entrypoints.server.app import create_app
from vllm_omni.entrypoints.server.state import ServerState
from vllm_omni.entrypoints.server.video_form import start_of

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


def app_with(**settings):
    config = ServerConfig((NAME,), **settings)
    client = EngineClient.create(tiny_deployment(), model_name=NAME, warm_up=False)
    return create_app(ServerState(client, config)), config


@pytest.mark.parametrize("place", ["extra_params", "sampling_params"])
@pytest.mark.parametrize("form", [lambda text: text, eval])
def test_encoding_while_generating_is_ignored_for_a_whole_video(place, form):
    options = form('{"preencode_mp4": 1, "action_path": "glide"}')
    start = start_of({"prompt": "p", place: options, "num_frames": 9})
    assert "preencode_mp4" not in start.extra_params
    assert start.rollout_fields()["extra_args"] == {"action_path": "glide"}


@pytest.mark.parametrize(("shown", "status"), [(True, 200), (False, 404)])
def test_the_api_page_can_be_switched_off(shown, status):
    app, _ = app_with(api_page=shown)
    asked = TestClient(app)
    assert [asked.get(path).status_code for path in ("/docs", "/openapi.json")] == [status] * 2


def test_methods_and_headers_of_other_pages_can_be_limited():
    app, _ = app_with(
        allowed_origins=("http://h:1",), allowed_methods=("GET",), allowed_headers=("X-Mine",)
    )
    ask = {"Origin": "http://h:1", "Access-Control-Request-Method": "POST"}
    assert TestClient(app).options("/v1/models", headers=ask).status_code == 400
    ask |= {"Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "x-other"}
    assert TestClient(app).options("/v1/models", headers=ask).status_code == 400
    ask["Access-Control-Request-Headers"] = "x-mine"
    assert TestClient(app).options("/v1/models", headers=ask).status_code == 200


def test_a_refused_page_is_told_the_flag_that_admits_it(caplog):
    app, _ = app_with()
    answer = TestClient(app).post("/v1/videos", headers={"Origin": "http://h:7860"})
    assert answer.status_code == 403
    assert (
        "start the server with --allowed-origins http://h:7860" in answer.json()["error"]["message"]
    )
    assert "--allowed-origins http://h:7860" in caplog.text


FORMAT = {"format": "THEIRS %(name)s %(message)s"}
KEY = {"Authorization": "Bearer its-key"}


def log_config(folder: Path) -> str:
    """A file as vLLM's users have it: its loggers are named, others are left as they are."""
    to_file = {"class": "logging.FileHandler", "formatter": "f", "filename": f"{folder}/access.log"}
    config = {
        "version": 1,
        "formatters": {"f": FORMAT},
        "handlers": {
            "stderr": {"class": "logging.StreamHandler", "formatter": "f"},
            "file": to_file,
        },
        "loggers": {
            "vllm_omni": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
            "uvicorn.access": {"handlers": ["file"], "level": "INFO", "propagate": False},
        },
    }
    (folder / "log.json").write_text(json.dumps(config))
    return f"{folder}/log.json"


@pytest.mark.timing
async def test_flags_from_a_file_behind_a_proxy(tmp_path: Path):
    flags = {
        "root-path": "/worlds",
        "log_config_file": log_config(tmp_path),
        "enable-request-id-headers": True,
        "disable_fastapi_docs": True,
        "allowed-origins": ["https://page.example"],
        "allow-credentials": True,
        "api-key": ["its-key"],
        "port": 1,  # The typed one wins.
    }
    (tmp_path / "flags.yaml").write_text(yaml.safe_dump(flags))
    with real_server("--config", f"{tmp_path}/flags.yaml") as server:
        for root in ("", "/worlds"):  # A proxy that strips its path, and one that does not.
            url = f"{server.address}{root}"
            assert httpx.get(f"{url}/").text.startswith("<!doctype html>")
            assert httpx.get(f"{url}/openapi.json").status_code == 404
            assert httpx.get(f"{url}/v1/models").status_code == 401
            asked = KEY | {"X-Request-Id": "mine", "Origin": "https://page.example"}
            answer = httpx.get(f"{url}/v1/models", headers=asked)
            assert answer.status_code == 200
            assert answer.headers["X-Request-Id"] == "mine"
            assert answer.headers["Access-Control-Allow-Credentials"] == "true"
            live = f"ws://127.0.0.1:{server.port}{root}/v1/realtime/video"
            async with socket_client(live, additional_headers=KEY) as client:
                await client.say(start_message())
                assert (await client.rest())["chunks"] == 3
        assert "THEIRS vllm_omni.entrypoints.server.app ready after" in server.log
        assert "THEIRS vllm_omni.diffusion.worker" in server.log  # a process of its own
        assert "GET /worlds/v1/models" in (tmp_path / "access.log").read_text()
        assert "GET /worlds/v1/models" not in server.log


@pytest.mark.timing
def test_a_unix_socket_and_ciphers(tmp_path: Path):
    left = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))  # What a server leaves that was killed.
    pem = str(Path(__file__).parents[2] / "helpers/fixtures/localhost.pem")
    flags = ("--uds", str(left), "--ssl-certfile", pem, "--ssl-ciphers", "ECDHE+CHACHA20")
    trusting = ssl.create_default_context(cafile=pem)
    trusting.maximum_version = ssl.TLSVersion.TLSv1_2
    with real_server(*flags, wait=False) as server:
        server.wait(lambda: f"Unix socket {left}, https" in server.log, "waiting for its address")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(left), verify=trusting)) as client:
            assert client.get("https://localhost/ping").status_code == 200
            # A proxy hands on the name that its client called.
            answer = client.get("https://localhost/v1/models", headers={"Host": "any.example"})
            assert answer.status_code == 200
        with socket.socket(socket.AF_UNIX) as plain:
            plain.connect(str(left))
            with trusting.wrap_socket(plain, server_hostname="localhost") as secure:
                cipher = secure.cipher()
        assert cipher is not None
        assert "CHACHA20" in cipher[0]  # OpenSSL itself would have chosen AES.
