"""Settings of the HTTP and WebSocket server, beside those of the engine."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from vllm_omni.errors import ConfigError
from vllm_omni.setting import Positive, Text, check_fields, setting
from vllm_omni.wording import refuse

Words = tuple[Text, ...]


def _path_of_proxy(path: str) -> str:
    if path and not re.fullmatch("(/[A-Za-z0-9._~-]+)+", path):
        raise refuse("must begin with / and not end with one, of letters, digits and . _ ~ -")
    return path


def _endpoint(url: str | None) -> str | None:
    if url is not None and not (url.startswith(("http://", "https://")) and urlsplit(url).hostname):
        raise refuse("must be a URL of http or https (OTLP over gRPC is not spoken)")
    return url


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the server listens, whom it lets in and what it writes down.

    Attributes:
        served_model_names: at least one; the first is announced.
        api_keys: empty lets everybody in.
        admin_keys: empty lets nobody in.
        allowed_origins: these may open sockets, post and read answers.
        allowed_media_domains: empty allows every host whose addresses are public; a host that is
            named may have any address.
        ssl_cert_reqs: one of ``ssl.VerifyMode``.
    """

    # fmt: off
    served_model_names: Annotated[Words, Field(min_length=1), setting(
        "names that a request may give as its model", "--served-model-name",
        unsaid="MODEL as given")] = ()
    host: Annotated[str | None, setting(
        "address to listen on", "--host", unsaid="all IPv4 addresses")] = None
    port: Annotated[int, Field(ge=0, le=65535), setting(
        "port to listen on; 0 lets the system choose", "--port")] = 8000
    uds: Annotated[Text | None, setting(
        "Unix socket to listen on, in the place of --host and --port", "--uds")] = None
    root_path: Annotated[str, AfterValidator(_path_of_proxy), setting(
        "path under which a proxy shows this server, for example /worlds, whether or not it strips "
        "that path", "--root-path")] = ""
    api_keys: Annotated[Words, setting(
        "requests must carry one of these as bearer token", "--api-key",
        unsaid="that of VLLM_API_KEY; none needed where it is not set",
        secret=True)] = field(default=(), repr=False)
    admin_keys: Annotated[Words, setting(
        "serve the routes below /admin, which drain a replica, to requests that carry one of these "
        "as bearer token", "--admin-key", unsaid="no such routes",
        secret=True)] = field(default=(), repr=False)
    allowed_origins: Annotated[Words, setting(
        "origins of web pages that may talk to the server besides its own (CORS and sockets), "
        "as words or as one JSON list; * for all",
        "--allowed-origins")] = ()
    allowed_hosts: Annotated[Words, setting(
        "the only names that requests may call this server by in their Host header, besides those "
        "of the loopback; * for all",
        "--allowed-hosts",
        unsaid="every name, or where --host is the loopback its names alone")] = ()
    allowed_media_domains: Annotated[Words, setting(
        "the only hosts that pictures are fetched from, private ones included",
        "--allowed-media-domains", unsaid="every host with public addresses")] = ()
    web_page: Annotated[bool, setting("serve no page at /", "--no-web-page")] = True
    api_page: Annotated[bool, setting(
        "serve no page at /docs and no /openapi.json", "--disable-fastapi-docs")] = True
    allowed_methods: Annotated[Words, setting(
        "methods that pages of --allowed-origins may use",
        "--allowed-methods", unsaid="all")] = ("*",)
    allowed_headers: Annotated[Words, setting(
        "headers that pages of --allowed-origins may send",
        "--allowed-headers", unsaid="all")] = ("*",)
    allow_credentials: Annotated[bool, setting(
        "let pages of --allowed-origins send credentials of the browser",
        "--allow-credentials")] = False
    max_pixels: Annotated[Positive, setting(
        "largest width x height of a request, in pixels", "--max-generated-image-size",
        unsaid="7680 x 4320")] = 7680 * 4320
    log_requests: Annotated[bool, setting("log each request", "--enable-log-requests")] = False
    log_file: Annotated[str | None, setting("write the log to this file, too", "--log-file")] = None
    log_format: Annotated[Literal["text", "json"], setting(
        "how log lines are written: json for one object a line", "--log-format")] = "text"
    log_config_file: Annotated[str | None, setting(
        "JSON file of logging.config.dictConfig, applied over the log as it is; loggers are "
        "vllm_omni, uvicorn.error and uvicorn.access. Formatters of the file hide no keys",
        "--log-config-file", unsaid="that of VLLM_LOGGING_CONFIG_PATH")] = None
    log_level: Annotated[Literal["critical", "error", "warning", "info", "debug", "trace"], setting(
        "what the HTTP server logs", "--uvicorn-log-level")] = "info"
    access_log: Annotated[bool, setting(
        "log no HTTP requests", "--disable-uvicorn-access-log")] = True
    ssl_keyfile: Annotated[str | None, setting("private key", "--ssl-keyfile")] = None
    ssl_certfile: Annotated[str | None, setting("certificate", "--ssl-certfile")] = None
    ssl_ca_certs: Annotated[str | None, setting(
        "authorities for certificates of clients", "--ssl-ca-certs")] = None
    ssl_ciphers: Annotated[str | None, setting(
        "ciphers of TLS up to 1.2, as OpenSSL writes them", "--ssl-ciphers",
        unsaid="uvicorn's")] = None
    ssl_cert_reqs: Annotated[Literal[0, 1, 2] | None, setting(
        "certificates of clients: 0 none, 1 optional, 2 required", "--ssl-cert-reqs",
        unsaid="2 with --ssl-ca-certs, else 0")] = None
    otlp_traces_endpoint: Annotated[str | None, AfterValidator(_endpoint), setting(
        "URL that traces are sent to by OTLP over HTTP, for example http://127.0.0.1:4318/v1/traces"
        "; needs the extra otel", "--otlp-traces-endpoint")] = None
    shutdown_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False), setting(
        "seconds for an orderly end after SIGTERM", "--shutdown-timeout")] = 30.0
    drain_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False), setting(
        "seconds that live worlds may go on after SIGTERM, before --shutdown-timeout begins; "
        "meanwhile /health and handshakes of new sockets are answered with 503",
        "--drain-timeout")] = 0.0
    video_encoder: Annotated[Literal["libx264", "h264_nvenc"], setting(
        "what makes H.264: libx264 on the CPU; h264_nvenc on an NVIDIA GPU, for which libx264 "
        "stands in, with a warning, where it does not open", "--video-encoder")] = "libx264"
    refuse_when_full: Annotated[bool, setting(
        "answer the handshake of a socket with 503 while no session can be taken, so that a proxy "
        "tries another server; else the socket opens and hears an error",
        "--refuse-when-full")] = False
    # fmt: on

    def __post_init__(self) -> None:
        check_fields(self, by_flag=True)
        for flag, keys in (("--api-key", self.api_keys), ("--admin-key", self.admin_keys)):
            for number, key in enumerate(keys, 1):
                if not key.isprintable() or key != key.strip():
                    raise ConfigError(
                        f"{flag}: key {number} begins or ends with a space or holds a character "
                        "that no header can carry; choose one of letters and digits (the variable "
                        "VLLM_API_KEY gives the one of --api-key)"
                    )
        tls = (self.ssl_keyfile, self.ssl_ca_certs, self.ssl_cert_reqs, self.ssl_ciphers)
        if any(tls) and not self.ssl_certfile:
            raise ConfigError(
                "--ssl-keyfile, --ssl-ca-certs, --ssl-cert-reqs and --ssl-ciphers need "
                "--ssl-certfile"
            )
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs: who signs the clients?")
        for flag, name in (
            ("--ssl-keyfile", self.ssl_keyfile),
            ("--ssl-certfile", self.ssl_certfile),
            ("--ssl-ca-certs", self.ssl_ca_certs),
            ("--log-config-file", self.log_config_file),
        ):
            if name is not None and not Path(name).is_file():
                raise ConfigError(f"{flag}: must name a file, got {name!r}")

    @property
    def client_certificates(self) -> int:
        """What is asked of certificates of clients, one of ``ssl.VerifyMode``."""
        if self.ssl_cert_reqs is not None:
            return self.ssl_cert_reqs
        return 0 if self.ssl_ca_certs is None else 2
