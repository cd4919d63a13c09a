"""Certificates that cannot be used are refused at the start, in one line."""

import ssl
from pathlib import Path

import pytest

from vllm_omni.config.server import ServerConfig
from vllm_omni.entrypoints.server.start_checks import check_tls
from vllm_omni.errors import ConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

CERTIFICATE = Path(__file__).parents[2] / "helpers/fixtures/localhost.pem"
BROKEN = "-----BEGIN CERTIFICATE-----\nbm8gY2VydGlmaWNhdGU=\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("content", ["", "hello", BROKEN, "\x00\xff" * 100, BROKEN[:40]])
def test_what_is_no_certificate(tmp_path: Path, content):
    file = tmp_path / "cert.pem"
    file.write_text(content)
    server = ServerConfig(("world",), ssl_certfile=str(file), ssl_keyfile=str(file))
    with pytest.raises(ConfigError, match=r"--ssl-certfile and --ssl-keyfile: .*: .") as refused:
        check_tls(server)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("ciphers", ["nonsense", "ECDHE+nonsense", "", ":"])
def test_what_is_no_cipher(ciphers):
    server = ServerConfig(("world",), ssl_certfile=str(CERTIFICATE), ssl_ciphers=ciphers)
    with pytest.raises(ConfigError, match=r"--ssl-ciphers: .*no cipher"):
        check_tls(server)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"ssl_cert_reqs": 2}, "need --ssl-certfile"),
     ({"ssl_cert_reqs": 1, "ssl_certfile": __file__}, "needs --ssl-ca-certs"),
     ({"ssl_ca_certs": __file__}, "need --ssl-certfile"),
     ({"ssl_ciphers": "ECDHE+AESGCM"}, "need --ssl-certfile")],
)  # fmt: skip
def test_what_would_protect_nothing(settings, words):
    with pytest.raises(ConfigError, match=words):
        ServerConfig(("world",), **settings)


@pytest.mark.parametrize(
    ("settings", "asked"),
    [({}, ssl.CERT_NONE), ({"ssl_ca_certs": __file__}, ssl.CERT_REQUIRED),
     ({"ssl_ca_certs": __file__, "ssl_cert_reqs": 1}, ssl.CERT_OPTIONAL),
     ({"ssl_ca_certs": __file__, "ssl_cert_reqs": 0}, ssl.CERT_NONE)],
)  # fmt: skip
def test_authorities_ask_for_certificates_of_clients(settings, asked):
    config = ServerConfig(("world",), ssl_certfile=__file__, **settings)
    assert config.client_certificates == asked
