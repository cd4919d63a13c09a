"""Signals to a server that starts, and the first process of a container.

The latter is tried as a process that collects orphans like one.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.helpers.local_server import wait_until
from tests.helpers.server import CPU_TINY, PLAIN, free_port
from tests.helpers.tiny import tiny_checkpoint_dir
from vllm_omni.entrypoints.cli import main

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]

_HEAD = """
import ctypes, os, sys, time
from vllm_omni.entrypoints.cli.main import run_under_init
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans come here
def run():
"""


def started(body: str, after: str = "") -> subprocess.Popen[str]:
    """A process under which ``body`` runs, in a session of its own; ``after`` follows its end."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    code = f"{_HEAD}{lines}\nstatus = run_under_init(run)\n{after}\nsys.exit(status)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[3], start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("status", [0, 1, 7])
def test_the_status_of_the_command_is_its_own(status):
    with started(f"print('up', flush=True); return {status}") as process:
        assert process.wait(20) == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_reach_a_command_that_has_no_handler_yet(number):
    code = (  # Whoever runs the tests may ignore signals, as nohup does.
        "import signal; [signal.signal(n, signal.SIG_DFL) for n in (1, 2, 15)]\n"
        "print('up', flush=True); time.sleep(60)"
    )
    with started(code) as process:
        process.send_signal(number)
        assert process.wait(20) == 128 + number


def test_a_command_that_handles_a_signal_ends_as_it_likes():
    with started(
        "import signal\nsignal.signal(15, lambda *_: os._exit(3))\n"
        "print('up', flush=True)\ntime.sleep(60)"
    ) as process:
        process.terminate()
        assert process.wait(20) == 3


def test_an_interrupt_of_the_terminal_reaches_the_command_once():
    with started(
        "import signal\nheard = []\nsignal.signal(2, lambda *_: heard.append(2))\n"
        "print('up', flush=True)\nwhile not heard:\n    time.sleep(0.01)\n"
        "time.sleep(1)\nreturn len(heard)"
    ) as process:
        # Two signals at once would count as one, so the first process passes its own on late.
        process.send_signal(signal.SIGSTOP)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
        time.sleep(0.3)
        process.send_signal(signal.SIGCONT)
        assert process.wait(20) == 1


def test_a_signal_after_the_end_of_the_command_changes_nothing():
    with started(
        "print('up', flush=True); os._exit(7)", after="os.kill(os.getpid(), 15)"
    ) as process:
        assert process.wait(20) == 7


def test_orphans_are_collected():
    with started(
        "if os.fork() == 0:\n    if os.fork() == 0:\n        time.sleep(0.2)\n    os._exit(0)\n"
        "os.wait()\nprint('up', flush=True)\ntime.sleep(60)\nreturn 0"
    ) as process:
        init = psutil.Process(process.pid)
        deadline = time.monotonic() + 20
        while len(init.children()) > 1:
            assert time.monotonic() < deadline, init.children()
            time.sleep(0.05)
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM


def _has_handler(pid: int, number: int) -> bool:
    """Whether a process that may have ended handles a signal, as Linux says."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


def _stop(after_s: float | None, number: int, folder: Path) -> float:
    """Stop a server so long after its start, or as soon as its command runs.

    Whatever it was doing, it ends with status 0, without a word of alarm and alone. Before
    its command runs, which is Python's own start, the signal itself ends it.

    Returns:
        Seconds from the signal to the end.
    """
    log = folder / "log"
    before = signal.signal(number, signal.SIG_DFL)  # A server of a run by nohup ignores SIGHUP.
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *PLAIN, str(tiny_checkpoint_dir()), "--omni", "--port",
             str(free_port()), "--host", "127.0.0.1", "--deploy-config", str(CPU_TINY)],
            stdout=out, stderr=out, cwd=Path(__file__).parents[3], start_new_session=True,
        )  # fmt: skip
    signal.signal(number, before)
    if after_s is None:
        wait_until(lambda: process.poll() is not None or _has_handler(process.pid, number))
    else:
        time.sleep(after_s)
    runs = _has_handler(process.pid, number)
    family = psutil.Process(process.pid).children(recursive=True)
    began_s = time.monotonic()
    process.send_signal(number)
    status = process.wait(60)
    took_s = time.monotonic() - began_s
    _, alive = psutil.wait_procs(family, timeout=20)
    said = log.read_text()
    assert status == 0 if runs else status in {0, -number}, (after_s, status, said)
    assert "Traceback" not in said
    assert not alive, (after_s, alive)
    return took_s


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_server_ends_well_from_its_first_moment_on(number, tmp_path):
    _stop(None, number, tmp_path)


@pytest.mark.parametrize(
    ("line", "serves"),
    [
        ("serve m", True),
        ("--omni serve m", True),
        ("bench serve", False),
        ("demo --out serve", False),
    ],
)
def test_only_a_server_ends_so(line, serves, monkeypatch):
    handled = []
    monkeypatch.setattr(main, "_end_at_signals", lambda: handled.append(line))
    monkeypatch.setattr(main, "dispatch", lambda _: 0)
    monkeypatch.setattr("sys.argv", ["vllm-omni", *line.split()])
    assert main._run_line() == 0
    assert bool(handled) is serves


@pytest.mark.soak
def test_a_server_ends_well_at_whatever_moment(tmp_path):
    for after_s in np.random.default_rng(0).uniform(0.05, 5.0, 20):
        assert _stop(float(after_s), signal.SIGTERM, tmp_path) < 5.0, after_s
