"""One battery for every executor: same bytes, same errors, nothing left behind."""

import os
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.faults import faulty_main, install_faults
from tests.helpers.fixtures.carriers import CARRIERS, group_config, group_executor, raylets
from tests.helpers.sessions import make_chunks, make_rollout, small_request
from tests.helpers.tiny import tiny_config
from vllm_omni.diffusion.executor.inline import InlineExecutor
from vllm_omni.diffusion.executor.multiprocess import MultiprocExecutor
from vllm_omni.diffusion.geometry import VideoGeometry, chunk_pixel_frames
from vllm_omni.diffusion.messages import ChunkPlan, OutputKind
from vllm_omni.diffusion.worker.worker import Worker
from vllm_omni.errors import (
    CheckpointError,
    DeviceOutOfMemoryError,
    OutOfKVMemoryError,
    SessionClosedError,
    SessionFailedError,
    WorkerFailedError,
)

__all__ = ["raylets"]

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

SIZE = VideoGeometry(64, 96)


@pytest.fixture(scope="module", params=["inline", *CARRIERS])
def executor(request):
    """One started executor with room for exactly one session of :data:`SIZE`."""
    patch = pytest.MonkeyPatch()
    install_faults(patch)
    if request.param == "inline":
        made = InlineExecutor(tiny_config("inline"))
    else:
        if request.param == "ray":
            request.getfixturevalue("raylets")
        made = group_executor(group_config(request.param), faulty_main)
    ready = made.start()
    assert ready.sessions == 1
    assert ready.num_pages == ready.pages_for(SIZE.tokens_per_frame)
    yield made
    made.shutdown()
    patch.undo()


@pytest.fixture(scope="module")
def reference():
    """The rollout of a worker that no executor stands before."""
    made = {}
    worker = Worker(tiny_config("inline"))
    for kind in OutputKind:
        chunks = []
        worker.open_session("direct", small_request(num_chunks=3, output=kind))
        for index in range(3):
            worker.run_chunk(ChunkPlan("direct", index), chunks.append)
        worker.close_session("direct")
        made[kind] = [chunk.data for chunk in chunks]
    return made


@pytest.mark.parametrize("kind", list(OutputKind))
def test_bytes_are_those_of_the_bare_worker(executor, reference, kind):
    # Bitwise: an executor only moves data.
    made = make_rollout(executor, small_request(num_chunks=3, output=kind))
    assert len(made) == 3
    for data, expected in zip(made, reference[kind], strict=True):
        assert data.dtype == expected.dtype
        assert np.array_equal(data, expected)


def test_chunks_are_delivered_once_and_stay_the_callers(executor):
    executor.open_session("a", small_request(num_chunks=3))
    made = make_chunks(executor, "a", range(1))
    first = made[0].data.copy()
    made += make_chunks(executor, "a", range(1, 3))
    executor.close_session("a")
    assert [chunk.chunk_index for chunk in made] == [0, 1, 2]
    assert [len(chunk.data) for chunk in made] == [chunk_pixel_frames(i) for i in range(3)]
    assert np.array_equal(made[0].data, first)
    assert made[0].data.flags.writeable
    assert made[0].ready_s < made[1].ready_s < made[2].ready_s


def test_pixels_come_before_the_commit(executor):
    executor.open_session("a", small_request())
    seen = []
    timings = executor.run_chunk(ChunkPlan("a", 0), lambda chunk: seen.append(chunk.timings))
    executor.close_session("a")
    assert seen[0].probes_ms > 0
    assert seen[0].commit_ms == 0.0
    assert timings.commit_ms > 0.0
    assert timings.probes_ms == seen[0].probes_ms


def test_refusals_leave_the_open_session_alone(executor, reference):
    request = small_request(num_chunks=3)
    executor.open_session("a", request)
    made = make_chunks(executor, "a", range(1))
    with pytest.raises(OutOfKVMemoryError, match="KV pages"):
        executor.open_session("b", request)
    with pytest.raises(SessionClosedError, match="b is not open"):
        executor.run_chunk(ChunkPlan("b", 0), made.append)
    executor.close_session("b")
    made += make_chunks(executor, "a", range(1, 3))
    executor.close_session("a")
    for chunk, expected in zip(made, reference[OutputKind.UINT8], strict=True):
        assert np.array_equal(chunk.data, expected)


def test_close_twice_and_begin_anew(executor, reference):
    executor.open_session("a", small_request(seed=5))
    make_chunks(executor, "a", range(1))
    executor.close_session("a")
    executor.close_session("a")
    executor.open_session("a", small_request(seed=5))
    make_chunks(executor, "a", range(1))
    again = make_rollout(executor, small_request(num_chunks=3), session_id="a")
    assert np.array_equal(again[2], reference[OutputKind.UINT8][2])


@pytest.mark.parametrize(
    ("session_id", "error", "text"),
    [
        ("oom:1:0", DeviceOutOfMemoryError, "injected"),
        ("bug:1:0", SessionFailedError, "RuntimeError"),
    ],
)
def test_a_raising_chunk_ends_its_session_and_nothing_else(
    executor, reference, session_id, error, text
):
    executor.open_session(session_id, small_request())
    make_chunks(executor, session_id, range(1))
    with pytest.raises(error, match=text) as caught:
        make_chunks(executor, session_id, range(1, 2))
    assert "Traceback" not in str(caught.value)
    with pytest.raises(SessionClosedError):
        make_chunks(executor, session_id, range(2, 3))
    # The pool holds one session: this one opens only if everything was given back.
    made = make_rollout(executor, small_request(num_chunks=3))
    assert np.array_equal(made[2], reference[OutputKind.UINT8][2])


def test_a_raising_receiver_ends_the_session(executor, reference):
    def refuse(_chunk):
        raise LookupError("the receiver is gone")

    executor.open_session("a", small_request())
    with pytest.raises((LookupError, SessionFailedError)):
        executor.run_chunk(ChunkPlan("a", 0), refuse)
    with pytest.raises(SessionClosedError):
        executor.run_chunk(ChunkPlan("a", 1), refuse)
    made = make_rollout(executor, small_request(num_chunks=3))
    assert np.array_equal(made[2], reference[OutputKind.UINT8][2])


def test_peak_memory(executor):
    assert executor.peak_bytes() > 50e6  # an interpreter that has loaded torch


@pytest.mark.parametrize("kind", ["inline", *CARRIERS])
def test_a_bad_checkpoint_is_told_by_its_own_error(kind, tmp_path, request):
    if kind == "ray":
        request.getfixturevalue("raylets")
    broken = replace(tiny_config(kind), model=str(tmp_path))
    made = InlineExecutor(broken) if kind == "inline" else group_executor(broken)
    with pytest.raises(CheckpointError, match="model_index"):
        made.start()
    made.shutdown()


@pytest.mark.parametrize("make", [InlineExecutor, MultiprocExecutor])
def test_an_executor_that_does_not_run(make):
    made = make(tiny_config("inline"))
    with pytest.raises(WorkerFailedError, match="not running"):
        made.close_session("a")
    made.shutdown()
    made.shutdown()


def test_the_environment_of_the_deployment_holds_in_the_process_of_an_inline_worker(monkeypatch):
    monkeypatch.setenv("LINGBOT_MARKER", "before")
    made = InlineExecutor(tiny_config("inline", env={"LINGBOT_MARKER": "here"}))
    made.start()
    made.shutdown()
    assert os.environ["LINGBOT_MARKER"] == "here"
