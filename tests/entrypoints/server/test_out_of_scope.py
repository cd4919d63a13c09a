"""Routes of other products are not there, as the page about the routes says."""

from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from tests.helpers.local_server import local_server
from tests.helpers.socket_client import socket_client

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

ROUTES = ("/start_profile", "/stop_profile", "/v1/omni/sleep", "/v1/omni/wakeup")
SOCKETS = ("/v1/realtime", "/v1/realtime/sessions")
PAGE = (Path(__file__).parents[3] / "docs/reference/http_api.md").read_text()


@pytest.fixture(scope="module")
def server():
    with local_server() as running:
        yield running


@pytest.mark.parametrize("route", ROUTES)
def test_routes(server, route):
    assert httpx.post(f"{server.address}{route}").status_code == 404
    assert f"`{route}`" in PAGE


@pytest.mark.parametrize("path", SOCKETS)
async def test_sockets(server, path):
    with pytest.raises(InvalidStatus) as refused:
        async with socket_client(f"ws://127.0.0.1:{server.port}{path}"):
            pass
    assert refused.value.response.status_code == 403
    assert f"`{path}`" in PAGE
