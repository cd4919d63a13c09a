"""Print the completion of this command for a shell. Each shell has its own way to load it:

source <(vllm-omni completion bash)
source <(vllm-omni completion zsh)
vllm-omni completion fish | source
"""

import argparse
from collections.abc import Sequence

from vllm_omni.entrypoints.cli.main import COMMANDS, parser_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the name of a shell."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=tuple(_SCRIPTS))


def run(args: argparse.Namespace) -> int:
    """Print the script of the shell that was named."""
    print(_SCRIPTS[args.shell]({name: options_of(name) for name in COMMANDS}))
    return 0


def options_of(name: str) -> list[argparse.Action]:
    """What a sub-command's parser takes, without spellings that its help hides."""
    actions = parser_of(name)._actions  # noqa: SLF001
    return [action for action in actions if action.help != argparse.SUPPRESS]


def _values(option: argparse.Action) -> str:
    """Values that a flag or a positional word takes, blank where any will do."""
    metavar = option.metavar
    if option.choices is None and isinstance(metavar, str) and metavar.startswith("{"):
        return metavar.strip("{}").replace(",", " ")
    return " ".join(map(str, option.choices or ()))


Options = dict[str, list[argparse.Action]]


def _bash(options: Options) -> str:
    """A function that fills COMPREPLY; words that no rule knows are completed as file names."""
    return "\n".join([
        "_vllm_omni() {",
        '  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=""',
        '  case "$COMP_CWORD:${COMP_WORDS[1]}:$before" in',
        f'    1:*) words="{" ".join(COMMANDS)} --help --version" ;;',
        *(f'    *:{command}:{name}) words="{_values(option)}" ;;'
          for command, found in options.items() for option in found
          if option.option_strings and option.nargs != 0
          for name in [f"|*:{command}:".join(option.option_strings)]),
        *(f'    *:{command}:*) words="{" ".join(_first_words(found))}" ;;'
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
                             for n in option.option_strings)  # fmt: skip
            if words := _values(option):
                values = f"{'-x ' if flags else '-f '}-a {_quoted(words)}"
            else:
                values = "-r" if option.nargs != 0 and flags else ""
            if flags or values:
                told = f"-d {_quoted(option.help.replace('%%', '%'))}" if option.help else ""
                lines.append(" ".join(filter(None, (start, flags, values, told))))
    return "\n".join(lines)


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}


def _first_words(found: Sequence[argparse.Action]) -> list[str]:
    """Words that may stand where no value is due: flags, and values of positional words."""
    flags = [name for option in found for name in option.option_strings]
    places = [option for option in found if not option.option_strings]
    return flags + [words for option in places if (words := _values(option))]


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
