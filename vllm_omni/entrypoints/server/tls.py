"""Tries what TLS will need at the start, so that what is wrong is one line."""

import ssl

from vllm_omni.config.server import ServerConfig
from vllm_omni.errors import ConfigError
from vllm_omni.system_errors import reason
from vllm_omni.wording import shown


def check_tls(server: ServerConfig) -> None:
    """Load what TLS will need, as the server will.

    Raises:
        ConfigError: naming the flags of what cannot be used, and why.
    """
    if server.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, _refuse_to_ask)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--ssl-certfile and --ssl-keyfile: the certificate or its key cannot be used: "
            f"{_reason(error)}"
        ) from None
    if server.ssl_ciphers is not None:
        try:
            context.set_ciphers(server.ssl_ciphers)
        except ssl.SSLError:
            raise ConfigError(
                f"--ssl-ciphers: OpenSSL knows no cipher of {shown(server.ssl_ciphers)}; "
                "`openssl ciphers` lists them"
            ) from None
    if server.ssl_ca_certs is None:
        return
    try:
        context.load_verify_locations(server.ssl_ca_certs)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--ssl-ca-certs: the authorities cannot be used: {_reason(error)}"
        ) from None


def _refuse_to_ask() -> str:
    raise ValueError("the key needs a password; give one without")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        known = {
            "NO_START_LINE": "the file is not PEM",
            "KEY_VALUES_MISMATCH": "the key belongs to another certificate",
        }
        return known.get(error.reason or "", error.reason or "it is damaged")
    return reason(error) if isinstance(error, OSError) else str(error)
