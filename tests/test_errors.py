"""Errors cross pipes and end as answers to clients; what the system refuses is one line."""

import copy
import errno
import os
import pickle
from pathlib import Path

import pytest

from vllm_omni import errors
from vllm_omni.entrypoints.server.http_errors import error_response
from vllm_omni.errors import InternalError, InvalidRequestError, OmniError
from vllm_omni.system_errors import expand_home, is_refusal, reason, sentence

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

CLASSES = [
    found
    for found in vars(errors).values()
    if isinstance(found, type) and issubclass(found, OmniError)
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("duplicate", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_a_copy_says_the_same(kind, duplicate):
    twin = duplicate(kind("what was got"))
    assert type(twin) is kind
    assert str(twin) == str(kind("what was got"))


def test_a_copy_keeps_the_field():
    error = InvalidRequestError("must be odd", field="seed")
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.field) == ("seed: must be odd", "seed")


def test_every_class_is_in_the_drawing():
    for kind in CLASSES:
        assert kind.__name__ in errors.__doc__


def test_our_own_bugs_are_not_blamed_on_the_client():
    error = InternalError("chunk 3 was asked for after chunk 1")
    assert not isinstance(error, ValueError)
    assert error_response(error).status_code == 500


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
def test_words_of_the_system(error, said):
    assert is_refusal(error)
    assert said in sentence(error)
    assert "\n" not in sentence(error)


def test_a_bug_is_no_refusal():
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
