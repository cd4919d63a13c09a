"""The log of a real server: where it is, what it is doing, all of it in one file; and Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.server import CPU_TINY, PLAIN, ROOT, START_S, real_server
from tests.helpers.tiny import tiny_checkpoint_dir

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.omni,
    pytest.mark.parallel,
    pytest.mark.cpu,
    pytest.mark.timing,
]

STAMPED = re.compile(r"(\[rank \d\] )?[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[\w.]+\] ")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The log file and the screen of a server of two ranks on a port of the system's choice."""
    path = tmp_path_factory.mktemp("log") / "serve.log"
    # Later flags win over those of the helper.
    with real_server("--port", "0", "--usp", "2", "--log-file", str(path), wait=False) as server:
        server.wait(lambda: "ready after" in server.log, "waiting to be ready")
        ready = re.search(
            r"ready after [\d.]+ s: (http://127.0.0.1:(\d+)/) \(page\), (.*)", server.log
        )
        assert ready is not None
        server.port = int(ready[2])
        assert ready[1] == f"{server.address}/"
        assert ready[3] == server.url
        assert server.health() == 200
        assert server.get("/metrics")[0] == 200
        assert server.get("/v1/models")[0] == 200
        assert server.get("/v1/nothing")[0] == 404
        assert server.terminate() == 0
        return path.read_text(), server.log


@pytest.mark.advanced_model
def test_the_file_holds_what_the_screen_shows(served):
    file, screen = served
    # Lines of several processes may change places between the two.
    assert sorted(file.splitlines()) == sorted(screen.splitlines())
    assert all(STAMPED.match(line) for line in file.splitlines())


def test_the_file_holds_the_lines_of_the_workers_and_of_the_http_server(served):
    file, _ = served
    assert re.search(r"^\[rank \d\] INFO .* KV pool: ", file, re.MULTILINE) is not None
    assert '"GET /v1/models HTTP/1.1" 200' in file
    assert '"GET /v1/nothing HTTP/1.1" 404' in file
    assert "GET /health" not in file
    assert "GET /metrics" not in file


def test_the_root_rank_tells_of_each_file_it_loads_and_each_chunk_of_the_warm_up(served):
    file, _ = served
    for line in ("loading transformer: file 1 of 1", "loading vae: file 1 of 1"):
        assert len(re.findall(rf"^\[rank 0\] INFO .* {line}$", file, re.MULTILINE)) == 1
        assert file.count(line) == 1
    assert [f"warm-up: chunk {number} of 5" in file for number in range(1, 7)] == [True] * 5 + [
        False
    ]


def test_the_lines_come_in_the_order_of_what_happens(served):
    file, _ = served
    steps = ("listening, and loading the model: http://127.0.0.1:", "loading transformer: file",
             "warm-up: chunk 5 of 5", "ready after ", "SIGTERM: draining", "stopped")  # fmt: skip
    places = [file.index(step) for step in steps]
    assert places == sorted(places)
    for line in ("startup complete", "Uvicorn running", "Started server process", "Shutting down"):
        assert line not in file


def test_settings_left_to_the_checkpoint_are_said_to_be(served):
    file, _ = served
    assert "window_chunks=the checkpoint's" in file
    assert "sink_chunks=the checkpoint's" in file


@pytest.mark.parametrize("later_s", [0.2, 1.5], ids=["launching", "loading"])
def test_ctrl_c_while_the_model_loads_leaves_no_traceback(tmp_path, later_s):
    log = tmp_path / "log"
    command = (
        sys.executable, *PLAIN, str(tiny_checkpoint_dir()), "--omni", "--deploy-config",
        str(CPU_TINY), "--host", "127.0.0.1", "--port", "0",
    )  # fmt: skip
    with log.open("wb") as sink:
        # A group of its own, like a terminal's: Ctrl-C reaches every process in it.
        server = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=sink,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_S
        while "loading the model" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(later_s)
        os.killpg(server.pid, signal.SIGINT)
        # 130 where a starved machine has not come to the server's own handler yet.
        assert server.wait(START_S) in {0, 130}
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    for word in ("Traceback", "KeyboardInterrupt"):
        assert word not in log.read_text()
