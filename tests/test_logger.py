"""Lines of this package, of the HTTP server in it and of worker processes go to one place."""

import json
import logging
import multiprocessing
from datetime import datetime
from types import SimpleNamespace

import pytest

from vllm_omni.logger import (
    OnceAMinute,
    adopt,
    configure_logging,
    get_logger,
    log_failure,
    log_file,
    logs_json,
    request_id,
    spellings_of,
)

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

LINES, PROCESSES = 200, 2


@pytest.fixture(autouse=True)
def _logging_as_it_was():
    touched = [logging.getLogger(name) for name in ("vllm_omni", "a_library")]
    before = [(each.handlers[:], each.level, each.propagate) for each in touched]
    yield
    configure_logging()  # closes files
    for each, (handlers, level, propagate) in zip(touched, before, strict=True):
        each.handlers[:], each.propagate = handlers, propagate
        each.setLevel(level)


def test_a_file_gets_what_stderr_gets(tmp_path, capsys):
    path = tmp_path / "log"
    configure_logging(rank=3, file=str(path))
    get_logger("vllm_omni.part").info("one line")
    assert log_file() == str(path)
    assert path.read_text() == capsys.readouterr().err
    assert path.read_text().startswith("[rank 3] INFO ")
    configure_logging()
    get_logger("vllm_omni.part").info("another line")
    assert log_file() is None
    assert "another" not in path.read_text()


def test_lines_of_an_adopted_library_go_where_ours_go(tmp_path):
    configure_logging()
    adopt("a_library")
    configure_logging(file=str(tmp_path / "log"))  # later: what counts is where ours go now
    logging.getLogger("a_library.part").warning("from below")
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert line.startswith("WARNING ")
    assert line.endswith("[a_library.part] from below")


def test_nothing_is_adopted_where_nothing_was_configured(caplog):
    package = logging.getLogger("vllm_omni")
    package.handlers[:] = []
    adopt("a_library")
    logging.getLogger("a_library").warning("still propagates")
    assert "still propagates" in caplog.text


def _write(path: str, rank: int) -> None:
    configure_logging(rank=rank, file=path)
    for number in range(LINES):
        get_logger("vllm_omni.part").info("line %d %s", number, "x" * 500)


def test_processes_append_whole_lines_to_one_file(tmp_path):
    path = str(tmp_path / "log")
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(path, rank)) for rank in range(PROCESSES)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == LINES * PROCESSES
    for rank in range(PROCESSES):
        own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        numbers = [int(line.split(" line ")[1].split()[0]) for line in own]
        assert numbers == list(range(LINES))
        assert all(line.endswith("x" * 500) for line in own)


def test_a_full_disk_is_told_once_and_without_a_traceback(capsys):
    configure_logging(file="/dev/full")
    log = get_logger("vllm_omni.part")
    log.info("first")
    assert log_failure() is not None
    log.info("second")
    said = capsys.readouterr().err
    assert said.count("log lines are lost: '/dev/full': No space left on device") == 1
    assert "Traceback" not in said
    assert said.count(" first\n") == said.count(" second\n") == 1


def test_a_file_that_takes_lines_again_is_no_failure(tmp_path):
    configure_logging(file=str(tmp_path / "log"))
    get_logger("vllm_omni.part").info("half a pair \ud83d and a name %s", "\udce9")
    assert log_failure() is None
    assert r"half a pair \ud83d and a name \udce9" in (tmp_path / "log").read_text()


def test_a_mistake_in_a_call_of_the_logger_is_told_as_one(tmp_path, capsys):
    configure_logging(file=str(tmp_path / "log"))
    get_logger("vllm_omni.part").info("%d", "no number")
    assert "TypeError" in capsys.readouterr().err
    assert log_failure() is None


@pytest.mark.parametrize("odd", ["\x1b[31mred", "a\x00b", "\r", "\x9b2J", "\u2028", "\x7f"])
def test_no_terminal_obeys_a_line(capsys, odd):
    configure_logging()
    get_logger("vllm_omni.part").info("from %s", odd)
    assert capsys.readouterr().err.rstrip("\n").isprintable()


def test_json_has_one_object_a_line(capsys):
    configure_logging(as_json=True, rank=2)
    assert logs_json()
    token = request_id.set("mine")
    try:
        raise ValueError("two\nlines \x1b")  # noqa: TRY301
    except ValueError:
        get_logger("vllm_omni.part").exception("a %s", "fault\n\ud83d")
    finally:
        request_id.reset(token)
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert datetime.fromisoformat(found.pop("time")).tzinfo is not None
    assert "ValueError: two\nlines" in found.pop("exception")
    assert found == {
        "level": "ERROR",
        "logger": "vllm_omni.part",
        "message": "a fault\n\ud83d",
        "rank": 2,
        "request_id": "mine",
    }


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    "line",
    ["GET /v1/models?api_key={}&x=1", "< Authorization: Bearer {}", "vllm-omni, bearer.{}",
     "?token={}", "the key {} itself", "TOKEN={}"],
)  # fmt: skip
def test_no_line_holds_a_key(capsys, as_json, line):
    key = "s3cr/t key"
    configure_logging(as_json=as_json, secrets=spellings_of([key]))
    for spelling in (key, "s3cr%2Ft%20key", "czNjci90IGtleQ"):
        get_logger("vllm_omni.part").info("%s", line.format(spelling))
    written = capsys.readouterr().err
    assert not [one for one in ("s3cr", "czNj", "t key") if one in written]
    assert written.count("***") >= 3


def test_a_wrong_key_is_hidden_too(capsys):
    configure_logging()
    get_logger("vllm_omni.part").info("GET /?api_key=wrong&x=1 Authorization: bearer other")
    assert "?api_key=***&x=1" in (written := capsys.readouterr().err)
    assert "other" not in written


def test_a_line_once_a_minute(monkeypatch):
    clock = iter([5.0, 5.1, 64.9, 65.0, 65.1, 130.0])
    monkeypatch.setattr("vllm_omni.logger.time", SimpleNamespace(monotonic=lambda: next(clock)))
    line = OnceAMinute()
    assert [line.is_due() for _ in range(6)] == [True, False, False, True, False, True]
