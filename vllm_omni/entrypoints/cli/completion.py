"""Print the completion of this command for a shell. Each shell has its own way to load it:

source <(vllm-omni completion bash)
source <(vllm-omni completion zsh)
vllm-omni completion fish | source
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from vllm_omni.entrypoints.cli.main import COMMANDS, parser_of


@dataclass(frozen=True, slots=True)
class Option:
    """One flag or positional word of a sub-command, as a shell needs to know it.

    Attributes:
        names: spellings of a flag; none for a positional word.
        words: values that it takes, where it takes only some.
        takes_value: whether a word follows the flag.
    """

    names: tuple[str, ...]
    words: tuple[str, ...]
    takes_value: bool
    help: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the name of a shell."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=tuple(_SCRIPTS))


def run(args: argparse.Namespace) -> int:
    """Print the script of the shell that was named."""
    print(_SCRIPTS[args.shell]({name: options_of(name) for name in COMMANDS}))
    return 0


def options_of(name: str) -> list[Option]:
    """What a sub-command's parser takes, without spellings that its help hides."""
    actions = parser_of(name)._actions  # noqa: SLF001
    return [_option(action) for action in actions if action.help != argparse.SUPPRESS]


def _option(action: argparse.Action) -> Option:
    text = (action.help or "").replace("%%", "%")
    words = tuple(str(word) for word in action.choices or ())
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if not words and metavar.startswith("{"):
        words = tuple(metavar.strip("{}").split(","))
    return Option(tuple(action.option_strings), words, action.nargs != 0, text)


Options = dict[str, list[Option]]


def _bash(options: Options) -> str:
    """A function that fills COMPREPLY; words that no rule knows are completed as file names."""
    return "\n".join([
        "_vllm_omni() {",
        '  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=""',
        '  case "$COMP_CWORD:${COMP_WORDS[1]}:$before" in',
        f'    1:*) words="{_spaced(COMMANDS)} --help --version" ;;',
        *(f'    *:{command}:{name}) words="{_spaced(option.words)}" ;;'
          for command, option in _with_value(options)
          for name in [f"|*:{command}:".join(option.names)]),
        *(f'    *:{command}:*) words="{_spaced(_first_words(found))}" ;;'
          for command, found in options.items()),
        "  esac",
        '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _vllm_omni vllm-omni",
    ])  # fmt: skip


def _zsh(options: Options) -> str:
    """The function of bash, by the emulation that zsh brings."""
    return "\n".join([
        "(( $+functions[compdef] )) || { autoload -U compinit && compinit }",
        "autoload -U +X bashcompinit && bashcompinit",
        _bash(options),
    ])  # fmt: skip


def _fish(options: Options) -> str:
    """One line for each command and each flag, with its help."""
    lines = [
        f"complete -c vllm-omni -n __fish_use_subcommand -f -a {name} -d {_quoted(command.summary)}"
        for name, command in COMMANDS.items()
    ]
    for command, found in options.items():
        start = f"complete -c vllm-omni -n '__fish_seen_subcommand_from {command}'"
        for option in found:
            flags = " ".join(f"-{'l' if n[:2] == '--' else 's'} {n.lstrip('-')}"
                             if n[:2] == "--" or len(n) == 2 else f"-o {n[1:]}"
                             for n in option.names)  # fmt: skip
            if option.words:
                values = f"{'-x ' if flags else '-f '}-a {_quoted(_spaced(option.words))}"
            else:
                values = "-r" if option.takes_value and flags else ""
            if flags or values:
                told = f"-d {_quoted(option.help)}" if option.help else ""
                lines.append(" ".join(filter(None, (start, flags, values, told))))
    return "\n".join(lines)


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}


def _with_value(options: Options) -> Iterator[tuple[str, Option]]:
    """Flags that a value follows; one without known values completes file names."""
    for command, found in options.items():
        for option in found:
            if option.names and option.takes_value:
                yield command, option


def _first_words(found: Sequence[Option]) -> list[str]:
    """Words that may stand where no value is due: flags, and values of positional words."""
    flags = [name for option in found for name in option.names]
    return flags + [word for option in found if not option.names for word in option.words]


def _spaced(words: Iterable[str]) -> str:
    return " ".join(words)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
