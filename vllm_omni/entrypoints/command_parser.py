"""A parser whose errors are two lines: how to get help, and what is wrong, with a way out."""

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from vllm_omni.wording import shown

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
        # Here, so that parsers of other commands do not load the configuration.
        from vllm_omni.config.keys import suggest

        known = {option for option in self._option_string_actions if "_" not in option}

        def spell(key: str) -> str:
            for action in self._actions:
                if action.dest.partition(".")[2] == key:
                    return action.option_strings[0]
            own = f"--{key.replace('_', '-')}"
            return own if own in known else f"{key} in a deploy file"

        local = [option.lstrip("-").replace("-", "_") for option in known]
        return flag + suggest(flag.lstrip("-").replace("-", "_"), local, spell)


def _plain(text: str) -> str:
    """Refuse what only Python reads as a number: ``1_000``, other digits than 0 to 9."""
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return text


def integer(text: str) -> int:
    """A word as an integer."""
    try:
        return int(_plain(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {shown(text)}") from None


def number(text: str) -> float:
    """A word as a number."""
    try:
        return float(_plain(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {shown(text)}") from None
