"""Why a rank did not start reaches the executor as what it is, and never as a lost group."""

import errno
import os
import subprocess
import sys
from multiprocessing import Pipe

import pytest

from vllm_omni.diffusion.executor.worker_group import launch_failure
from vllm_omni.diffusion.worker.process import Refused, _ExitingPipe, _reporting
from vllm_omni.errors import CheckpointError, WorkerFailedError

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

_EMFILE = OSError(errno.EMFILE, "Too many open files")


def noted(error: Exception, note: str) -> Exception:
    error.add_note(note)
    return error


def reported(error: Exception) -> tuple[Exception | None, object]:
    """What the executor gets, and the exit status of the process."""
    ours, theirs = Pipe()
    with pytest.raises(SystemExit) as ended, _reporting(1, _ExitingPipe(theirs)):
        raise error
    reply = ours.recv()
    assert isinstance(reply, Refused)
    return reply.error, ended.value.code


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/m/v"), "'/m/v': Permission denied"),
        (_EMFILE, "Too many open files; raise the limit of open files (ulimit -n)"),
        (MemoryError(), "out of memory; the machine or the container has too little memory"),
        (ImportError("libtorch.so: failed to map"), "ImportError: libtorch.so: failed to map"),
        (noted(Exception("no variant"), "in the tokenizer folder"),
         "Exception: no variant; in the tokenizer folder"),
    ],
)  # fmt: skip
def test_whatever_is_raised_is_said_in_one_line(error, said, capfd):
    reply, status = reported(error)
    assert isinstance(reply, WorkerFailedError)
    assert str(reply) == f"rank 1 could not load the model: {said}"
    assert status == 1
    assert "Traceback" not in capfd.readouterr().err


def test_a_refusal_keeps_its_class():
    reply, status = reported(CheckpointError("vae/config.json is not JSON"))
    assert isinstance(reply, CheckpointError)
    assert status == 0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (_EMFILE, "ulimit -n"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u"),
        (EOFError(), "no process can be forked"),
        (OSError("AF_UNIX path too long"), "AF_UNIX path too long"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
    ],
)
def test_processes_that_cannot_be_started(error, said):
    failure = launch_failure(error)
    assert str(failure).startswith("the worker processes could not be started: ")
    assert said in str(failure)


@pytest.mark.parametrize("length", [40, 75, 76, 105, 200])
def test_sockets_do_not_need_a_short_temporary_folder(length):
    """The longest path of a socket has 107 bytes; 75 and 32 of the fork server are that many."""
    folder = "/tmp/" + f"{os.getpid()}_{length}_".ljust(length - 5, "x")
    os.mkdir(folder)
    script = (
        "import tempfile\n"
        "from multiprocessing.connection import Listener\n"
        "from vllm_omni.diffusion.executor.worker_group import _shorten_socket_names\n"
        "_shorten_socket_names()\n"
        "with Listener(family='AF_UNIX') as one: print(one.address)\n"
        "print(tempfile.gettempdir())\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], env=os.environ | {"TMPDIR": folder},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    finally:
        os.rmdir(folder)
    address, temporary = done.stdout.split()
    assert temporary == folder
    assert address.startswith(f"{folder}/") is (length <= 75)
