"""A parser whose errors are two lines: how to get help, and what is wrong, with a way out."""

import argparse
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from vllm_omni.config.vllm_names import INSTEAD, UNUSED

_FLAG = re.compile(r"--?[A-Za-z][^=]*")


class CommandParser(argparse.ArgumentParser):
    """argparse without the page of usage that hides the error.

    An unknown flag is answered by the closest one, by the setting that stands for a name of
    vLLM's, or by the key of the deploy file of that name. The exit status is 2.
    """

    def parse_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse a line; anything unknown on it ends the process."""
        parsed, rest = self.parse_known_args(args, namespace or argparse.Namespace())
        if rest:
            flags = [match[0] for word in rest if (match := _FLAG.match(word)) is not None]
            listed = ", ".join(self._with_hint(flag) for flag in flags) or " ".join(rest)
            self.error(f"unrecognized arguments: {listed}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        usage = f"usage: {self.prog} [options]; '{self.prog} --help' lists them"
        self.exit(2, f"{usage}\n{self.prog}: error: {message}\n")

    def _with_hint(self, flag: str) -> str:
        hint = self._hint(flag.lstrip("-").replace("-", "_"))
        return flag if hint is None else f"{flag} ({hint})"

    def _hint(self, name: str) -> str | None:
        known = {option for option in self._option_string_actions if "_" not in option}
        if name in INSTEAD:
            instead = _spelled(INSTEAD[name])
            return f"use {instead}" if instead in known else f"set {INSTEAD[name]} in a deploy file"
        if name in UNUSED:
            return "not used by this model"
        path = _deploy_path(name)
        if path is not None:
            return f"set {path} in a deploy file"
        close = get_close_matches(_spelled(name), known, n=1)
        return f"did you mean {close[0]}?" if close else None


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _deploy_path(name: str) -> str | None:
    """Dotted path of an ordinary key of the deploy file that is no flag."""
    # Here, so that parsers of other commands do not load the configuration.
    from vllm_omni.config.deploy import KVSection, ModelSection
    from vllm_omni.config.schema import Section, status_of, yaml_key
    from vllm_omni.config.stage import StageSection

    sections: tuple[tuple[str, type[Section]], ...] = (
        ("", StageSection),
        ("model_config.", ModelSection),
        ("model_config.ar_diffusion_kv_config.", KVSection),
    )
    for prefix, section in sections:
        for field_name, field in section.model_fields.items():
            if yaml_key(field_name, field) == name and status_of(field) is None:
                return f"{prefix}{name}"
    return None
