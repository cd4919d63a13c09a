"""Serve a world model over HTTP and WebSocket."""

import argparse
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from vllm_omni import envs
from vllm_omni.config.deploy_file import PACKAGED_DIR
from vllm_omni.config.keys import COMMAND_LINE
from vllm_omni.config.resolve import ResolvedDeployment, resolve
from vllm_omni.config.server import ServerConfig
from vllm_omni.entrypoints.cli.flags import (
    add_flags,
    refuse_by_name,
    typed_values,
    with_config_file,
)
from vllm_omni.entrypoints.server.connections import BACKLOG, raise_descriptor_limit
from vllm_omni.envs import detect_platform
from vllm_omni.errors import ConfigError
from vllm_omni.logger import (
    apply_log_config,
    configure_logging,
    get_logger,
    log_failure,
    spellings_of,
)
from vllm_omni.model_extras import require_model
from vllm_omni.setting import HIDDEN
from vllm_omni.system_errors import reason, sentence
from vllm_omni.wording import shown

logger = get_logger(__name__)

_WITHOUT_DEPLOY_FILE = PACKAGED_DIR / "live_worlds.yaml"
"""File that stands in where none is named: worlds are streamed and steered."""
_JSON_LISTS = {
    "allowed_origins": "--allowed-origins",
    "allowed_methods": "--allowed-methods",
    "allowed_headers": "--allowed-headers",
}
_TCP_FLAGS = "--host or --port"
_SERVER_MODULE = "vllm_omni.entrypoints.server.app"
_CHECKS_MODULE = "vllm_omni.entrypoints.server.start_checks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and all flags of the table."""
    parser.usage = "%(prog)s MODEL --omni [options]"
    parser.add_argument(
        "serve.model_tag",
        metavar="MODEL",
        nargs="?",
        default=argparse.SUPPRESS,
        help="checkpoint directory, hub id that is in the local cache, or toy_world",
    )
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Refuse what can be refused, take the port, then start the engine and serve until the end.

    Raises:
        ConfigError: what cannot be honoured; nothing was started.
        CheckpointError: a directory that does not hold this model; nothing was started.
    """
    configure_logging()
    raise_descriptor_limit()
    args = with_config_file(args)
    model = _model(args)
    refuse_by_name(args)
    server = _server_config(args, model)
    with _log_as(server):
        import_module(_CHECKS_MODULE).check_tls(server)
        logger.info("serving %s; non-default args: %s", model, _typed_line(args))
        if (failure := log_failure()) is not None:
            raise ConfigError(f"--log-file: {server.log_file!r}: {reason(failure)}")
        resolved = _resolve(args, model)
        _print_once(resolved)
        import_module(_CHECKS_MODULE).check_machine(resolved)
        with open_listener(server) as listener:
            app = import_module(_SERVER_MODULE)
            return app.run_server(resolved, server=server, listener=listener)


def _model(args: argparse.Namespace) -> str:
    given = typed_values(args, "serve")
    names = {str(given[key]) for key in ("model_tag", "model") if key in given}
    if len(names) > 1:
        raise ConfigError(f"MODEL is {given['model_tag']!r} but --model is {given['model']!r}")
    model = names.pop() if names else ""
    require_model(model)
    return model


def _resolve(args: argparse.Namespace, model: str) -> ResolvedDeployment:
    given = typed_values(args, "serve")
    stage_overrides = given.get("stage_overrides")
    if stage_overrides is not None and not isinstance(stage_overrides, dict):
        raise ConfigError(
            f'--stage-overrides: must look like {{"0": {{...}}}}, got {shown(stage_overrides)}'
        )
    return resolve(
        model,
        deploy_config=str(given.get("deploy_config", _WITHOUT_DEPLOY_FILE)),
        overrides=typed_values(args, "engine"),
        stage_overrides=stage_overrides,
        platform=detect_platform(),
        executor="mp",
        source=COMMAND_LINE,
    )


def _server_config(args: argparse.Namespace, model: str) -> ServerConfig:
    given = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in typed_values(args, "server").items()
    }
    for key, flag in _JSON_LISTS.items():
        words = given.get(key)
        if isinstance(words, tuple):
            given[key] = _listed(words, flag)
    key = envs.api_key()
    if key is not None and "api_keys" not in given:
        logger.info("requests need the API key of VLLM_API_KEY")
        given["api_keys"] = (key,)
    given = {"log_config_file": envs.log_config_file()} | given
    return replace(ServerConfig((model,)), **given)


def _listed(words: tuple[str, ...], flag: str) -> tuple[str, ...]:
    """Words as they are typed, or as the one JSON list that vLLM's flag of this name takes."""
    if len(words) != 1 or not words[0].lstrip().startswith("["):
        return words
    try:
        listed = json.loads(words[0])
    except ValueError as error:
        raise ConfigError(f"{flag} is not a JSON list: {error}") from None
    if not all(isinstance(word, str) for word in listed):
        raise ConfigError(f"{flag}: must list texts, got {shown(listed)}")
    return tuple(listed)


_SECRETS = ("server.api_keys", "server.admin_keys")


def _typed_line(args: argparse.Namespace) -> str:
    shown = {
        name.partition(".")[2]: HIDDEN if name in _SECRETS else _without_secrets(value)
        for name, value in vars(args).items()
        if name.partition(".")[0] in {"engine", "server", "serve", "refuse"}
    }
    return str(shown)


def _without_secrets(value: object) -> object:
    """A typed value with the values of every ``env`` in it hidden."""
    if not isinstance(value, dict):
        return value
    return {
        key: _hidden(inner) if key == "env" else _without_secrets(inner)
        for key, inner in value.items()
    }


def _hidden(env: object) -> object:
    return dict.fromkeys(env, HIDDEN) if isinstance(env, dict) else HIDDEN


def _print_once(resolved: ResolvedDeployment) -> None:
    set_values = [value for value in resolved.origins if value.origin != "default"]
    defaults = [value for value in resolved.origins if value.origin == "default"]
    for value in set_values:
        logger.info("%s", value)
    logger.info("defaults: %s", ", ".join(f"{value.key}={value.shown}" for value in defaults))
    for note in resolved.no_effect:
        logger.warning("%s", note)


@contextmanager
def _log_as(server: ServerConfig) -> Iterator[None]:
    """Write the log in the format that is asked for, and to a file, too, where one is named."""
    try:
        configure_logging(
            file=server.log_file,
            as_json=server.log_format == "json",
            secrets=spellings_of((*server.api_keys, *server.admin_keys)),
        )
    except OSError as error:
        raise ConfigError(f"--log-file: {sentence(error)}") from None
    if server.log_config_file is not None:
        try:
            apply_log_config(server.log_config_file)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--log-config-file: {server.log_config_file!r}: {error}") from None
        envs.export({envs.log_config_file.name: server.log_config_file})  # for the workers
    try:
        yield
    finally:
        configure_logging()


def open_listener(server: ServerConfig) -> socket.socket:
    """Take the port, or the Unix socket, before anything is loaded.

    The socket listens at once: without that, a second server could bind the same port.

    Raises:
        ConfigError: if the address is in use or not of this machine.
    """
    host = server.host or ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address, where, flags = (host, server.port), f"{host or '0.0.0.0'}:{server.port}", _TCP_FLAGS
    if server.uds is not None:
        family, address, where, flags = socket.AF_UNIX, server.uds, server.uds, "--uds"
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if server.uds is not None:
            _remove_if_left(Path(server.uds))
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {where}: {reason(error)}; choose another {flags}"
        ) from None
    return listener


def _remove_if_left(path: Path) -> None:
    """Remove a Unix socket that nobody listens on any more: nothing else makes its place free."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as asking:
            try:
                asking.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
