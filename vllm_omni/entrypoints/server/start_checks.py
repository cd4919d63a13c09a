"""Tries at start what the server will need of the machine, and names what is not there."""

from __future__ import annotations

import resource
import ssl
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from vllm_omni.config.resolve import ResolvedDeployment
from vllm_omni.config.server import ServerConfig
from vllm_omni.diffusion.worker.shared_bytes import SharedBytes
from vllm_omni.entrypoints.server.video_store import VideoStore
from vllm_omni.errors import ConfigError
from vllm_omni.system_errors import is_refusal, reason
from vllm_omni.wording import shown

_DESCRIPTORS = 64
"""What a server with one rank and no client has open at most while it loads its model."""
_DESCRIPTORS_PER_RANK = 4
_THREADS = 16
"""Threads of the server itself: the event loop, media, the engine."""
_THREADS_PER_RANK = 4
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_BYTES_PER_RANK = 16 * 2**20
"""NCCL keeps its channels between the ranks of one machine there."""


def check_machine(resolved: ResolvedDeployment) -> None:
    """Try everything that a server of this deployment needs beside its model and its port.

    Raises:
        ConfigError: naming the first thing that the system refuses, why, and what to change.
    """
    ranks = resolved.config.parallel.world_size
    _check_descriptors(ranks)
    _try("no folder for temporary files (TMPDIR) can be written", _write_temporary_file)
    VideoStore.try_out()
    _try("memory that processes share cannot be made", lambda: SharedBytes.create().close())
    if resolved.config.device == "cuda" and ranks > 1:
        _try(
            f"{_SHARED_MEMORY} is needed by {ranks} ranks: --shm-size of a container",
            lambda: _write_temporary_file(_SHARED_MEMORY, ranks * _SHARED_BYTES_PER_RANK),
        )
    _try("processes and threads cannot be started", lambda: _start_threads(ranks))


def _try(needed: str, attempt: Callable[[], None]) -> None:
    try:
        attempt()
    except (OSError, RuntimeError, MemoryError) as error:
        if not is_refusal(error):
            raise
        raise ConfigError(f"{needed}: {reason(error)}") from None


def _check_descriptors(ranks: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _DESCRIPTORS + ranks * _DESCRIPTORS_PER_RANK
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ConfigError(
            f"this process may open {limit} files, the server needs at least {needed}: raise the "
            "limit of open files (ulimit -n)"
        )


def _write_temporary_file(folder: Path | None = None, num_bytes: int = 1) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        for start in range(0, num_bytes, 2**20):
            file.write(bytes(min(2**20, num_bytes - start)))
        file.flush()


def _start_threads(ranks: int) -> None:
    """Run as many threads at once as there will be; each counts like a process."""
    end = threading.Event()
    threads = [
        threading.Thread(target=end.wait, daemon=True)
        for _ in range(_THREADS + ranks * _THREADS_PER_RANK)
    ]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    finally:
        end.set()
        for thread in started:
            thread.join()


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
            f"{_tls_reason(error)}"
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
            f"--ssl-ca-certs: the authorities cannot be used: {_tls_reason(error)}"
        ) from None


def _refuse_to_ask() -> str:
    raise ValueError("the key needs a password; give one without")


def _tls_reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        known = {
            "NO_START_LINE": "the file is not PEM",
            "KEY_VALUES_MISMATCH": "the key belongs to another certificate",
        }
        return known.get(error.reason or "", error.reason or "it is damaged")
    return reason(error) if isinstance(error, OSError) else str(error)
