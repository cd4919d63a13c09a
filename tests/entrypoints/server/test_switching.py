"""What users of the public package bring with them and this server takes."""

import pytest
from starlette.testclient import TestClient

from tests.helpers.http_server import NAME, tiny_deployment
from vllm_omni.config.keys import suggest
from vllm_omni.config.server import ServerConfig
from vllm_omni.entrypoints.engine_client import EngineClient
from vllm_omni.entrypoints.server.app import create_app
from vllm_omni.entrypoints.server.state import ServerState
from vllm_omni.entrypoints.server.transport import uvicorn_config
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


def test_ciphers_reach_the_server():
    app, config = app_with(ssl_ciphers="ECDHE+AESGCM")
    assert uvicorn_config(app, config).ssl_ciphers == "ECDHE+AESGCM"


def test_a_refused_page_is_told_the_flag_that_admits_it(caplog):
    app, _ = app_with()
    answer = TestClient(app).post("/v1/videos", headers={"Origin": "http://h:7860"})
    assert answer.status_code == 403
    assert (
        "start the server with --allowed-origins http://h:7860" in answer.json()["error"]["message"]
    )
    assert "--allowed-origins http://h:7860" in caplog.text


@pytest.mark.parametrize("name", ["root_path", "uds", "config", "log_config_file"])
def test_unlike_names_are_not_proposed(name):
    assert suggest(name, ["vae_fast_path", "usp", "port"]) == ""
