"""``--config``: flags from a YAML file, as vLLM's command takes them."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from vllm_omni.config.plain_yaml import read_mapping
from vllm_omni.entrypoints.cli.flags import add_flags, typed_values
from vllm_omni.entrypoints.command_parser import CommandParser
from vllm_omni.errors import ConfigError
from vllm_omni.system_errors import sentence


class _FileParser(CommandParser):
    """Takes the flags of a file as if they were typed; what is wrong names the file."""

    def __init__(self, file: str) -> None:
        super().__init__(prog="--config")
        self._file = file
        add_flags(self)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"--config {self._file}: {message}")

    def words_of(self, key: str, value: object) -> Iterator[str]:
        """A key and its value as words of a command line; none where nothing is given."""
        flag = f"--{key}"
        action = self._option_string_actions.get(flag)
        if value is False and action is not None and action.nargs == 0:
            if f"--no-{key}" in self._option_string_actions:
                yield f"--no-{key}"
        elif value is True or (isinstance(value, list) and (action is None or action.nargs)):
            yield flag
            yield from map(str, value if isinstance(value, list) else ())
        elif value is not None:
            yield f"{flag}={json.dumps(value) if isinstance(value, dict | list) else value}"


def with_config_file(args: argparse.Namespace) -> argparse.Namespace:
    """Typed flags, and those of the file of ``--config`` that were not typed.

    Raises:
        ConfigError: naming the file and the key that is wrong.
    """
    typed = vars(args)
    file = typed_values(args, "serve").get("config")
    if file is None:
        return args
    try:
        listed = read_mapping(Path(str(file)))
    except OSError as error:
        raise ConfigError(f"--config: {sentence(error)}") from None
    if "config" in listed:
        raise ConfigError(f"--config {file}: a file cannot name another one")
    parser = _FileParser(str(file))
    words = [word for key, value in listed.items() for word in parser.words_of(key, value)]
    filed = vars(parser.parse_args(words))
    if typed.keys() & {"serve.model_tag", "serve.model"}:
        filed.pop("serve.model", None)
    return argparse.Namespace(**filed | typed)
