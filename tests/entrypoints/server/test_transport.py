"""Where the server says it is, and what of uvicorn's log is kept."""

import logging

import pytest

from vllm_omni.config.server import ServerConfig
from vllm_omni.entrypoints.server.transport import describe_address, uvicorn_config

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

ADDRESSES = [
    (("127.0.0.1", 81), {}, "http://127.0.0.1:81/ (page), ws://127.0.0.1:81/v1/realtime/video"),
    (("127.0.0.1", 81), {"web_page": False},
     "http://127.0.0.1:81/, ws://127.0.0.1:81/v1/realtime/video"),
    (("0.0.0.0", 81), {},
     "http://127.0.0.1:81/ (page), ws://127.0.0.1:81/v1/realtime/video, on all addresses "
     "(0.0.0.0)"),
    (("::1", 81, 0, 0), {}, "http://[::1]:81/ (page), ws://[::1]:81/v1/realtime/video"),
    (("10.0.0.7", 81), {"ssl_certfile": __file__},
     "https://10.0.0.7:81/ (page), wss://10.0.0.7:81/v1/realtime/video"),
]  # fmt: skip


@pytest.mark.parametrize(("address", "settings", "said"), ADDRESSES)
def test_the_addresses_of_the_server(address, settings, said):
    assert describe_address(address, ServerConfig(("world",), **settings)) == said


def kept(
    name: str, message: str, args: tuple, *, level: int = logging.INFO, path: str = ""
) -> bool:
    logger = logging.getLogger(name)
    return bool(logger.filter(logging.LogRecord(name, level, path, 1, message, args, None)))


@pytest.fixture(autouse=True)
def _configured():
    uvicorn_config(lambda: None, ServerConfig(("world",)))


@pytest.mark.parametrize(
    ("method", "path", "status", "wanted"),
    [
        ("GET", "/health", 200, False),
        ("GET", "/metrics?x=1", 200, False),
        ("GET", "/health", 503, True),
        ("POST", "/health", 200, True),
        ("GET", "/healthy", 200, True),
        ("GET", "/v1/models", 200, True),
    ],
)
def test_successful_probes_are_no_lines_of_the_access_log(method, path, status, wanted):
    message = '%s - "%s %s HTTP/%s" %d'
    assert kept("uvicorn.access", message, ("1.2.3.4:5", method, path, "1.1", status)) == wanted


@pytest.mark.parametrize(
    ("path", "level", "wanted"),
    [
        ("/lib/uvicorn/lifespan/on.py", logging.INFO, False),
        ("/lib/uvicorn/server.py", logging.INFO, False),
        ("/lib/uvicorn/server.py", logging.ERROR, True),
        ("/lib/uvicorn/protocols/websockets/websockets_sansio_impl.py", logging.INFO, True),
        ("/lib/websockets/server.py", logging.INFO, True),
    ],
)
def test_the_server_does_not_say_that_it_is_up_before_the_model_is(path, level, wanted):
    line = "Application startup complete."
    assert kept("uvicorn.error", line, (), level=level, path=path) == wanted
