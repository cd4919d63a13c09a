"""Settings of the HTTP and WebSocket server, beside those of the engine."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from vllm_omni.errors import ConfigError

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the server listens, whom it lets in and what it writes down.

    Attributes:
        host: address to listen on; ``None`` for all IPv4 addresses.
        port: 0 lets the system choose.
        served_model_names: names that a request's ``model`` may give; the first is announced.
        api_keys: a request must carry one of them as bearer token; empty lets everybody in.
        allowed_origins: origins of web pages besides the server's own that may open sockets, post
            and read answers (CORS); ``"*"`` for all.
        allowed_media_domains: the only hosts that pictures are fetched from, whatever their
            address; empty allows every host whose addresses are public.
        web_page: whether the page at ``/`` is served.
        max_pixels: largest ``width * height`` that a request may ask for.
        log_requests: write down each request that arrives.
        log_file: also write the log there.
        shutdown_timeout_s: limit of an orderly end after SIGTERM.
    """

    served_model_names: tuple[str, ...]
    host: str | None = None
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_origins: tuple[str, ...] = ()
    allowed_media_domains: tuple[str, ...] = ()
    web_page: bool = True
    max_pixels: int = 7680 * 4320
    log_requests: bool = False
    log_file: str | None = None
    log_level: str = "info"
    access_log: bool = True
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = ssl.CERT_NONE.value
    shutdown_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}")
        if self.max_pixels < 1:
            raise ConfigError(
                f"--max-generated-image-size must be at least 1, got {self.max_pixels}"
            )
        if not 0 <= self.shutdown_timeout_s < float("inf"):
            raise ConfigError(
                f"--shutdown-timeout must be a number of seconds, got {self.shutdown_timeout_s}"
            )
        if not all(self.served_model_names) or not all(self.api_keys):
            raise ConfigError("--served-model-name and --api-key must not be blank")
        self._check_ssl()

    def _check_ssl(self) -> None:
        if (self.ssl_keyfile or self.ssl_ca_certs) and not self.ssl_certfile:
            raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        for flag, name in (
            ("--ssl-keyfile", self.ssl_keyfile),
            ("--ssl-certfile", self.ssl_certfile),
            ("--ssl-ca-certs", self.ssl_ca_certs),
        ):
            if name is not None and not Path(name).is_file():
                raise ConfigError(f"{flag} {name!r} is not a file")
        if self.ssl_cert_reqs not in {mode.value for mode in ssl.VerifyMode}:
            raise ConfigError(f"--ssl-cert-reqs must be 0, 1 or 2, got {self.ssl_cert_reqs}")
