"""A worker frees a session on every way out and leaves the others alone."""

import weakref
from contextlib import contextmanager

import pytest
import torch

from tests.helpers.mark import advanced
from tests.helpers.model_builders import (
    keys_request,
)
from tests.helpers.sessions import make_rollout
from vllm_omni.diffusion.messages import ChunkPlan
from vllm_omni.diffusion.models.lingbot_world.blocks import LingBotWorldBlock
from vllm_omni.diffusion.models.lingbot_world.pipeline import LingBotWorldCausalDMDPipeline
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE
from vllm_omni.errors import (
    DeviceOutOfMemoryError,
    OutOfKVMemoryError,
    SessionClosedError,
    SessionFailedError,
    WorkerFailedError,
)
from vllm_omni.platforms.cpu import CpuPlatform

pytest_plugins = ["tests.helpers.fixtures.workers"]
pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


class InjectedError(Exception):
    """Raised where a test wants it."""


class FailingPipeline(LingBotWorldCausalDMDPipeline):
    """The real pipeline that raises at one place of one chunk of session ``a``.

    Args:
        place: ``open``, ``probe`` (inside a forward), ``decode``, ``commit`` or ``last_layer``.
    """

    def __init__(self, worker, place, error, chunk=1):
        pipeline = worker.pipeline
        super().__init__(pipeline.config, pipeline.model, pipeline.platform)
        self.bind_pool(worker.pool)
        self.place, self.error, self.chunk = place, error, chunk

    def open_session(self, session_id, request):
        session = super().open_session(session_id, request)
        if self.place == "open":
            session.close()
            raise self.error
        return session

    def denoise_chunk(self, session, plan):
        places = {"probe": self.model.transformer.blocks[1], "decode": self.model.vae.decoder}
        with self._armed(places.get(self.place), session):
            return super().denoise_chunk(session, plan)

    def commit_chunk(self, session):
        if self.place == "commit" and self._is_victim(session):
            raise self.error
        last = self.model.transformer.blocks[-1].self_attn.norm_k
        with self._armed(last if self.place == "last_layer" else None, session):
            return super().commit_chunk(session)

    def _is_victim(self, session):
        return (session.session_id, session.committed.next_chunk) == ("a", self.chunk)

    @contextmanager
    def _armed(self, module, session):
        """Let ``module`` raise when it is called, in the chunk of choice."""

        def fail(*_):
            raise self.error

        if module is None or not self._is_victim(session):
            yield
            return
        hook = module.register_forward_pre_hook(fail)
        try:
            yield
        finally:
            hook.remove()


@pytest.fixture
def let_fail(worker, monkeypatch):
    """Gives the worker a pipeline that raises."""

    def arm(place, error):
        monkeypatch.setattr(worker, "pipeline", FailingPipeline(worker, place, error))

    return arm


PLACES = (
    "probe",
    advanced("decode"),
    "commit",
    advanced("last_layer"),
)


@pytest.mark.parametrize("place", PLACES)
def test_a_raise_frees_the_session_and_the_next_one_is_as_if_alone(worker, place, let_fail):
    """Bitwise: nothing of a failed session is left in the pool or in the modules."""
    request = keys_request(3)
    alone = make_rollout(worker, request)
    let_fail(place, InjectedError())
    delivered = []
    worker.open_session("a", request)
    worker.run_chunk(ChunkPlan("a", 0), delivered.append)
    with pytest.raises(SessionFailedError, match="chunk 1 of a failed inside the model") as caught:
        worker.run_chunk(ChunkPlan("a", 1), delivered.append)
    assert isinstance(caught.value.__cause__, InjectedError)
    assert worker.sessions == {}
    assert worker.pool.pages.num_free == worker.pool.pages.num_pages
    # Pixels leave before the commit, so a raise in it comes after the chunk was handed out.
    assert len(delivered) == (2 if place in {"commit", "last_layer"} else 1)
    with pytest.raises(SessionClosedError, match="session a is not open"):
        worker.run_chunk(ChunkPlan("a", 2), delivered.append)
    after = make_rollout(worker, request)
    assert all((x == y).all() for x, y in zip(alone, after, strict=True))


class DeadPlatform(CpuPlatform):
    """A device whose context an error has taken with it."""

    def synchronize(self, device):
        raise RuntimeError(f"{device}: an illegal memory access was encountered")


@pytest.mark.parametrize("place", PLACES)
def test_an_error_that_takes_the_device_with_it_asks_for_new_workers(
    worker, place, let_fail, monkeypatch
):
    let_fail(place, InjectedError())
    monkeypatch.setattr(worker, "platform", DeadPlatform())
    worker.open_session("a", keys_request(3))
    worker.run_chunk(ChunkPlan("a", 0), lambda _: None)
    with pytest.raises(WorkerFailedError, match=r"chunk 1 of a left the device unusable .*illegal"):
        worker.run_chunk(ChunkPlan("a", 1), lambda _: None)
    assert worker.sessions == {}


@pytest.mark.parametrize("place", PLACES)
def test_running_out_of_device_memory_has_an_error_of_its_own(worker, place, let_fail):
    error = torch.OutOfMemoryError("tried to allocate")
    let_fail(place, error)
    worker.open_session("a", keys_request(3))
    worker.run_chunk(ChunkPlan("a", 0), lambda _: None)
    with pytest.raises(DeviceOutOfMemoryError, match="chunk 1 of a ran out of device memory"):
        worker.run_chunk(ChunkPlan("a", 1), lambda _: None)
    assert worker.sessions == {}


@pytest.mark.parametrize("kind", [InjectedError, torch.OutOfMemoryError])
def test_who_holds_the_error_holds_no_activations(worker, kind, monkeypatch):
    """A tensor that only frames of the traceback hold is free while the error is at hand."""
    held = []

    def fail(_block, x, *_args, **_kwargs):
        held.append(weakref.ref(x))
        raise kind("a test wants it")

    worker.open_session("a", keys_request(1))
    monkeypatch.setattr(LingBotWorldBlock, "forward", fail)
    with pytest.raises((SessionFailedError, DeviceOutOfMemoryError)) as caught:
        worker.run_chunk(ChunkPlan("a", 0), lambda _: None)
    assert isinstance(caught.value.__cause__, kind)
    assert [tensor() for tensor in held] == [None]


def test_no_memory_to_open(worker, let_fail):
    let_fail("open", torch.OutOfMemoryError("none"))
    with pytest.raises(DeviceOutOfMemoryError, match="opening session a ran out of device memory"):
        worker.open_session("a", keys_request(3))
    assert worker.sessions == {}


def test_a_failure_leaves_other_sessions_alone(worker, let_fail):
    """Bitwise: B is the same whether or not A fails between its chunks."""
    request_a, request_b = keys_request(3, seed=1), keys_request(3, seed=2)
    alone = make_rollout(worker, request_b)
    let_fail("probe", InjectedError())
    delivered = []
    worker.open_session("a", request_a)
    worker.open_session("b", request_b)
    worker.run_chunk(ChunkPlan("b", 0), delivered.append)
    worker.run_chunk(ChunkPlan("a", 0), lambda _: None)
    with pytest.raises(SessionFailedError):
        worker.run_chunk(ChunkPlan("a", 1), lambda _: None)
    for chunk in (1, 2):
        worker.run_chunk(ChunkPlan("b", chunk), delivered.append)
    assert all((made.data == y).all() for made, y in zip(delivered, alone, strict=True))


def test_a_client_that_fails_to_take_a_chunk_loses_its_session(worker):
    def refuse(_):
        raise InjectedError

    worker.open_session("a", keys_request(2))
    with pytest.raises(SessionFailedError):
        worker.run_chunk(ChunkPlan("a", 0), refuse)
    assert worker.sessions == {}


def test_an_open_session_begins_anew_and_closing_is_idempotent(worker):
    """Bitwise: nothing of what was before is left."""
    request = keys_request(2, seed=4)
    alone = make_rollout(worker, request)
    worker.open_session("a", keys_request(2))
    worker.run_chunk(ChunkPlan("a", 0), lambda _: None)
    again = make_rollout(worker, request, session_id="a")
    assert all((x == y).all() for x, y in zip(alone, again, strict=True))
    worker.close_session("a")
    worker.close_session("never")
    assert worker.sessions == {}


def test_a_session_too_many_takes_nothing(worker):
    """The pool is of two sessions; the third is refused with numbers and leaves no trace."""
    worker.open_session("a", keys_request(2))
    worker.open_session("b", keys_request(2))
    free = worker.pool.pages.num_free
    with pytest.raises(OutOfKVMemoryError, match=r"needs \d+ KV pages, \d+ of \d+ are free"):
        worker.open_session("c", keys_request(2))
    assert (len(worker.sessions), worker.pool.pages.num_free) == (2, free)


def test_only_the_first_condition_is_made_before_its_pixels(worker, monkeypatch):
    """A later one is made behind the commit of the chunk before, and none for a chunk too many."""
    calls, encode = [], WanVAE.encode

    def noted(vae, *arguments):
        calls.append("encode")
        return encode(vae, *arguments)

    monkeypatch.setattr(WanVAE, "encode", noted)
    worker.open_session("a", keys_request(2))
    for chunk in range(2):
        timings = worker.run_chunk(ChunkPlan("a", chunk), lambda _: calls.append("pixels"))
        assert timings.condition_ms > 0
    assert calls == ["encode", "pixels", "encode", "pixels"]


def test_timings_cover_all_parts_and_come_with_the_chunk(worker):
    delivered = []
    worker.open_session("a", keys_request(1))
    timings = worker.run_chunk(ChunkPlan("a", 0), delivered.append)
    (result,) = delivered
    assert result.timings.commit_ms == 0  # not yet run when the pixels leave
    for part in ("condition_ms", "camera_ms", "probes_ms", "decode_ms", "commit_ms"):
        assert getattr(timings, part) > 0
    assert timings.probes_ms == result.timings.probes_ms
