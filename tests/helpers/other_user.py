"""A process of another user, for what root alone would be allowed."""

import os
from collections.abc import Callable

import pytest

_USER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes the user, as only root can")


def refusal_to_another_user(act: Callable[[], object], kind: type[Exception]) -> str:
    """Text of the error of this kind that ``act`` raises for a user without rights; else empty."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(_USER)
            act()
        except kind as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        return pipe.read()
