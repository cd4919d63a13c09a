"""Server settings refuse what cannot work, and keep keys out of logs."""

import pytest

from vllm_omni.config.server import ServerConfig
from vllm_omni.errors import ConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": -1}, "--port .* got -1"),
        ({"port": 65536}, "--port .* got 65536"),
        ({"max_pixels": 0}, "--max-generated-image-size"),
        ({"shutdown_timeout_s": -1.0}, "--shutdown-timeout"),
        ({"shutdown_timeout_s": float("nan")}, "--shutdown-timeout"),
        ({"api_keys": ("",)}, "--api-key must not be blank"),
        ({"ssl_keyfile": "key.pem"}, "need --ssl-certfile"),
        ({"ssl_certfile": "/no/such.pem"}, "--ssl-certfile '/no/such.pem' is not a file"),
        ({"ssl_cert_reqs": 3}, "--ssl-cert-reqs must be 0, 1 or 2, got 3"),
    ],
)
def test_settings_that_cannot_work(settings, message):
    with pytest.raises(ConfigError, match=message):
        ServerConfig(served_model_names=("world",), **settings)


def test_keys_are_not_shown():
    assert "secret" not in repr(ServerConfig(served_model_names=("world",), api_keys=("secret",)))
