"""The first process of a container: passes signals on and collects the children of others.

The kernel gives process 1 no default action for a signal, so one that comes before a handler is
there would be lost, and leaves it the orphans of everybody else.
"""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_OF_A_SIGNAL = 128
"""What shells add to the number of the signal that ended a command."""


def run_under_init(run: Callable[[], int]) -> int:
    """Run a command in a child of this process, which must be the first of its namespace.

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
