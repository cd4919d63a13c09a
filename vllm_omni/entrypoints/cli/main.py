"""The ``vllm-omni`` command: finds the sub-command and imports nothing else.

vLLM's own ``vllm`` command calls :func:`main` when ``--omni`` stands anywhere on its line, so
``vllm serve MODEL --omni`` and ``vllm-omni serve MODEL --omni`` are the same.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import FrameType

from vllm_omni.errors import OmniError
from vllm_omni.system_errors import is_refusal, sentence

OMNI_FLAG = "--omni"
_PROG = "vllm-omni"
_HELP = frozenset({"-h", "--help"})
_INTERRUPTED = 130
"""What shells report of a command that Ctrl-C has ended."""
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_OF_A_SIGNAL = 128
"""What shells add to the number of the signal that ended a command."""


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command. Its module offers ``add_arguments(parser)`` and ``run(args) -> int``.

    Attributes:
        module: imported only when the sub-command is chosen; loads no torch until ``run``.
        shared_with_vllm: vLLM has a command of this name, so where vLLM is installed ``--omni``
            asks for ours.
    """

    module: str
    summary: str
    shared_with_vllm: bool = False


COMMANDS: dict[str, Command] = {
    "bench": Command(
        "vllm_omni.benchmarks.realtime",
        "measure a running server as its viewers see it",
        shared_with_vllm=True,
    ),
    "completion": Command(
        "vllm_omni.entrypoints.cli.completion",
        "print the completion of this command for bash, zsh or fish",
    ),
    "demo": Command(
        "vllm_omni.entrypoints.cli.demo",
        "make a short video of a tiny trained world, on any CPU",
    ),
    "plan": Command(
        "vllm_omni.tools.capacity.plan",
        "plan how many GPUs, groups and pods a number of viewers takes",
    ),
    "serve": Command(
        "vllm_omni.entrypoints.cli.serve",
        "serve a world model over HTTP and WebSocket",
        shared_with_vllm=True,
    ),
    "tiny-checkpoint": Command(
        "vllm_omni.entrypoints.cli.tiny_checkpoint",
        "write a 5.8 MB checkpoint with random weights, for development",
    ),
}


def main() -> None:
    """Run the command line in ``sys.argv`` and exit with its status."""
    try:
        status = _run_line() if os.getpid() != 1 else run_under_init(_run_line)
    except KeyboardInterrupt:
        print(f"{_PROG}: interrupted", file=sys.stderr)
        status = _INTERRUPTED
    sys.exit(status)


def _run_line() -> int:
    arguments = sys.argv[1:]
    # Not any word of the line: `bench serve` is no server.
    if next((word for word in arguments if word != OMNI_FLAG), None) == "serve":
        _end_at_signals()
    return dispatch(arguments)


def _end_at_signals() -> None:
    """Let a server that does not listen yet end as one that does: whoever stops it asked for that.

    Uvicorn replaces these handlers. Until then there is nothing that would have to be ended, and an
    exception could be lost in whatever is being imported.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        os._exit(0)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as by nohup
            signal.signal(number, end)


def run_under_init(run: Callable[[], int]) -> int:
    """Run a command in a child of this process, which must be the first of its namespace.

    It passes signals on and collects the children of others: the kernel gives process 1 no default
    action for a signal, so that one which comes before a handler is there would be lost, and leaves
    it the orphans of everybody else.

    Returns:
        The exit status of the child.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    child = os.fork()
    if child == 0:
        os.setsid()  # else a terminal sends Ctrl-C to both, and the command gets it twice
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        return run()

    def pass_on(number: int, _: FrameType | None) -> None:
        with suppress(ProcessLookupError):  # the command has ended
            os.kill(child, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else _OF_A_SIGNAL - code


def dispatch(argv: Sequence[str]) -> int:
    """Run one command line, given without the program's name; returns the exit status."""
    arguments = [argument for argument in argv if argument != OMNI_FLAG]
    omni = len(arguments) < len(argv)
    if not arguments or arguments[0].startswith("-"):
        return _run_top_level(arguments)
    name, *rest = arguments
    command = COMMANDS.get(name)
    if command is None:
        return _refuse_unknown(name) if omni else _run_vllm(name)
    if command.shared_with_vllm and not omni and _HELP.isdisjoint(rest) and _has_vllm():
        return _run_vllm(name)
    return _run_command(name, command, rest)


def _has_vllm() -> bool:
    return find_spec("vllm") is not None


def _run_top_level(arguments: Sequence[str]) -> int:
    width = max(len(name) for name in COMMANDS)
    # Not above: what finds it takes longer to load than all the rest.
    from vllm_omni import __version__

    listing = "\n".join(f"  {name:<{width}}  {cmd.summary}" for name, cmd in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=_PROG,
        usage=f"{_PROG} COMMAND [options]",
        description="Serving of the LingBot-World v2 interactive world model.",
        epilog=f"commands:\n{listing}\n\n'{_PROG} COMMAND --help' lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-v", "--version", action="version", version=__version__)
    parser.parse_args(arguments)
    parser.print_help()
    return 0


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of a sub-command."""
    module = import_module(COMMANDS[name].module)
    # Not above: until main() runs, a process 1 is deaf to signals, so little is loaded before.
    from vllm_omni.entrypoints.command_parser import CommandParser

    parser = CommandParser(prog=f"{_PROG} {name}", description=module.__doc__)
    module.add_arguments(parser)
    return parser


def _run_command(name: str, command: Command, arguments: Sequence[str]) -> int:
    parser = parser_of(name)
    args = parser.parse_args(arguments)
    try:
        return import_module(command.module).run(args)
    except OmniError as error:
        text = str(error)
    except (OSError, MemoryError, RuntimeError) as error:
        if not is_refusal(error):
            raise
        text = sentence(error)
    print(f"{_PROG} {name}: error: {text}", file=sys.stderr)
    return 1


def _refuse_unknown(name: str) -> int:
    print(f"{_PROG}: error: no command {name!r}; choose {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def _run_vllm(name: str) -> int:
    """Without ``--omni`` a command line of vLLM is handed to vLLM, as its users expect."""
    if not _has_vllm():
        return _refuse_unknown(name)
    import_module("vllm.entrypoints.cli.main").main()
    return 0


if __name__ == "__main__":
    main()
