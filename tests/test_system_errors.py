"""What the system refuses is one line with the file and the reason."""

import errno
import os
from pathlib import Path

import pytest

from vllm_omni.system_errors import expand_home, is_refusal, reason, sentence

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file", "/a/b"), "'/a/b': No such file"),
        (
            OSError(errno.EMFILE, "Too many open files"),
            "files; raise the limit of open files",
        ),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u"),
        (OSError("AF_UNIX path too long"), "AF_UNIX path too long"),
        (OSError(errno.EIO, "Input/output error", b"/a/\xff"), r"'/a/\udcff': Input/output error"),
        (OSError(errno.EBADF, "Bad file", 7), "Bad file"),
        (MemoryError(), "out of memory"),
        (RuntimeError("can't start new thread"), "can't start new thread; raise the limit of proc"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_words(error, said):
    assert is_refusal(error)
    assert said in sentence(error)
    assert "\n" not in sentence(error)


def test_a_bug_is_none():
    assert not is_refusal(RuntimeError("a bug"))
    assert not is_refusal(KeyError("a bug"))


def test_what_the_system_says_of_a_file():
    with pytest.raises(NotADirectoryError) as caught:
        os.listdir("/dev/null/x")
    assert sentence(caught.value) == "'/dev/null/x': Not a directory"
    assert reason(caught.value) == "Not a directory"


def test_home_of_the_caller_and_of_nobody():
    assert expand_home("~/a") == Path.home() / "a"
    assert expand_home("a/~") == Path("a/~")
    with pytest.raises(OSError, match=r"Could not determine home .*'~no_such_user/a'"):
        expand_home("~no_such_user/a")
