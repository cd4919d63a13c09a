"""A worker that hands out video: its bytes, its place beside the commit, its failures, its end."""

import threading
import weakref
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.helpers.model_builders import keys_request, small_config, tiny_worker
from tests.helpers.sessions import make_rollout
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.messages import ChunkPlan, EncoderOptions, SessionRequest, VideoSettings
from vllm_omni.diffusion.worker import encoding
from vllm_omni.diffusion.worker.encoding import EncodingWorker
from vllm_omni.diffusion.worker.process import worker_class
from vllm_omni.diffusion.worker.worker import Worker
from vllm_omni.errors import OutOfKVMemoryError, SessionFailedError
from vllm_omni.outputs.media import ChunkEncoder

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

VIDEO = VideoSettings(EncoderOptions(crf=30.0), "libx264")


MADE: weakref.WeakSet[ChunkEncoder] = weakref.WeakSet()


class WatchedEncoder(ChunkEncoder):
    """Is counted while it is alive, and fails in the chunks that a test names."""

    failing: frozenset[int] = frozenset()

    def __init__(self, *arguments):
        super().__init__(*arguments)
        MADE.add(self)

    def encode(self, frames):
        if self._chunks in self.failing:
            raise RuntimeError("a test wants it")
        return super().encode(frames)


def alive() -> int:
    return len(MADE)


@cache
def encoding_worker() -> EncodingWorker:
    made = worker_class(small_config(encode_on="worker"))(small_config(encode_on="worker"))
    assert isinstance(made, EncodingWorker)
    return made


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(encoding, "ChunkEncoder", WatchedEncoder)
    monkeypatch.setattr(WatchedEncoder, "failing", frozenset())
    worker = encoding_worker()
    yield worker
    for session_id in tuple(worker.sessions):
        worker.close_session(session_id)
    assert alive() == 0
    assert worker.pool.pages.num_free == worker.pool.pages.num_pages


def filmed(seed: int = 1) -> SessionRequest:
    return replace(keys_request(2, seed=seed), video=VIDEO)


@cache
def pixels(seed: int) -> list[np.ndarray]:
    return make_rollout(encoding_worker(), keys_request(2, seed=seed))


def expected(*seeds: int) -> list[bytes]:
    """What the API process makes of one world after another of a session."""
    like = filmed()
    encoder = ChunkEncoder(like.width, like.height, like.fps, VIDEO.options, VIDEO.codec)
    return [encoder.encode(chunk) for seed in seeds for chunk in pixels(seed)]


def make(worker: Worker, session_id: str, *chunks: int) -> list:
    made: list = []
    for chunk in chunks:
        worker.run_chunk(ChunkPlan(session_id, chunk), made.append)
    return made


def payloads(made: list) -> list[bytes]:
    return [one.data.tobytes() for one in made]


def test_only_who_asks_for_video_gets_such_a_worker():
    assert worker_class(OmniDiffusionConfig(model="m")) is Worker


def test_two_worlds_at_once_one_of_which_begins_anew(worker):
    """Bitwise: the bytes of an encoder of its own for each session."""
    worker.open_session("a", filmed(1))
    worker.open_session("b", filmed(3))
    of_a, of_b = make(worker, "a", 0), make(worker, "b", 0)
    of_a += make(worker, "a", 1)
    worker.open_session("a", filmed(2))
    of_a += make(worker, "a", 0)
    of_b += make(worker, "b", 1)
    of_a += make(worker, "a", 1)
    assert alive() == 2
    assert all(one.timings.encode_ms > 0 < one.timings.probes_ms for one in of_a)
    worker.close_session("a")
    assert alive() == 1
    worker.close_session("b")
    assert payloads(of_a) == expected(1, 2)
    assert payloads(of_b) == expected(3)


def test_pixels_for_who_asks_for_none():
    """Bitwise what another kind of worker makes."""
    alone = make_rollout(tiny_worker(), keys_request(2, seed=1))
    assert all(np.array_equal(a, b) for a, b in zip(pixels(1), alone, strict=True))
    assert alive() == 0


def test_video_leaves_while_the_commit_runs(worker, monkeypatch):
    left = threading.Event()
    commit = worker.pipeline.commit_chunk

    def waiting_commit(session):
        assert left.wait(60), "the video waits for the commit"
        return commit(session)

    monkeypatch.setattr(worker.pipeline, "commit_chunk", waiting_commit)
    worker.open_session("a", filmed())
    worker.run_chunk(ChunkPlan("a", 0), lambda _: left.set())


def test_an_encoder_that_fails_costs_no_chunk_of_anybody_else(worker, caplog):
    """Other ranks, which know nothing of it, go on with the chunk: nothing may be raised."""
    whole = expected(1)
    WatchedEncoder.failing = frozenset({1})
    worker.open_session("a", filmed())
    made = make(worker, "a", 0, 1)
    assert payloads(made) == [whole[0], b""]
    assert "chunk 1 of a could not be encoded" in caplog.text
    assert "a test wants it" in caplog.text
    assert worker.sessions["a"].committed.next_chunk == 2
    WatchedEncoder.failing = frozenset()
    worker.open_session("b", filmed())
    assert payloads(make(worker, "b", 0)) == whole[:1]
    caplog.clear()


def test_one_that_cannot_be_made_is_one_that_fails(worker):
    worker.open_session("a", replace(filmed(), fps=0.0))
    assert payloads(make(worker, "a", 0)) == [b""]


@pytest.mark.parametrize("place", ["denoise_chunk", "commit_chunk"])
def test_a_chunk_that_raises_frees_the_encoder(worker, monkeypatch, place):
    worker.open_session("a", filmed())
    make(worker, "a", 0)
    monkeypatch.setattr(worker.pipeline, place, lambda *_: 1 / 0)
    with pytest.raises(SessionFailedError):
        make(worker, "a", 1)
    assert alive() == 0


def test_a_world_that_cannot_begin_anew_frees_the_encoder(worker, monkeypatch):
    worker.open_session("a", filmed())
    make(worker, "a", 0)

    def full(*_):
        raise OutOfKVMemoryError("no pages")

    monkeypatch.setattr(worker.pipeline, "open_session", full)
    with pytest.raises(OutOfKVMemoryError):
        worker.open_session("a", filmed())
    assert alive() == 0
    assert worker.sessions == {}


def test_a_client_that_fails_to_take_a_video_loses_its_session(worker):
    def refuse(_):
        raise ValueError

    worker.open_session("a", filmed())
    with pytest.raises(SessionFailedError):
        worker.run_chunk(ChunkPlan("a", 0), refuse)
    assert worker.sessions == {}
    assert alive() == 0


def test_an_encoder_that_does_not_open_is_told_of_and_replaced(worker, caplog):
    """Bitwise what libx264 makes."""
    whole, video = expected(1), replace(VIDEO, codec="no_such_encoder")
    worker.open_session("a", replace(filmed(), video=video))
    assert payloads(make(worker, "a", 0, 1)) == whole
    assert caplog.text.count("no_such_encoder does not open, libx264 stands in for it") == 1
    caplog.clear()
