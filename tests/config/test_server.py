"""Server settings refuse what cannot work, and keep keys out of logs."""

import pytest

from vllm_omni.config.server import ServerConfig
from vllm_omni.errors import ConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": -1}, "--port: must be at least 0, got -1"),
        ({"port": 65536}, "--port: must be at most 65535, got 65536"),
        ({"max_pixels": 0}, "--max-generated-image-size: must be at least 1, got 0"),
        ({"shutdown_timeout_s": -1.0}, "--shutdown-timeout"),
        ({"shutdown_timeout_s": float("nan")}, "--shutdown-timeout"),
        ({"api_keys": ("",)}, "--api-key.0: must not be empty, got \*\*\*"),
        ({"ssl_keyfile": "key.pem"}, "need --ssl-certfile"),
        ({"ssl_certfile": "/no/such.pem"}, "--ssl-certfile: must name a file, got '/no/such.pem'"),
        ({"served_model_names": ()}, "--served-model-name: must not be empty"),
    ],
)
def test_settings_that_cannot_work(settings, message):
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**{"served_model_names": ("world",)} | settings)


def test_keys_are_not_shown():
    assert "secret" not in repr(ServerConfig(served_model_names=("world",), api_keys=("secret",)))
