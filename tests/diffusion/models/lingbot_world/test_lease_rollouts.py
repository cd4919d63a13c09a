"""Whole rollouts over post-attention graphs, on the eager runtime of the CPU.

Bitwise with the same rollout without them: the graphs run the same modules on the same values.
"""

import logging
from multiprocessing.connection import Connection

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.rollouts import NUM_CHUNKS, PROMPTS, RankRollout, roll
from tests.helpers.sessions import make_chunks, small_request
from tests.helpers.tiny import tiny_checkpoint_dir
from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.executor.inline import InlineExecutor
from vllm_omni.diffusion.executor.multiprocess import MultiprocExecutor
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import ChunkPlan
from vllm_omni.diffusion.models.lingbot_world.blocks import EAGER
from vllm_omni.diffusion.models.lingbot_world.leased_post_attention import (
    Lease,
    LeasedPostAttention,
    LeaseRecord,
)
from vllm_omni.diffusion.models.lingbot_world.session import CommittedState, SessionSetup
from vllm_omni.diffusion.models.lingbot_world.transformer import ChunkContext
from vllm_omni.diffusion.worker import process
from vllm_omni.diffusion.worker.process import WorkerTask
from vllm_omni.diffusion.worker.shared_bytes import SharedBytes
from vllm_omni.diffusion.worker.worker import PeersLeftWaitingError, Worker
from vllm_omni.engine.supervisor import WorkerSupervisor
from vllm_omni.errors import ConfigError, WorkerFailedError
from vllm_omni.platforms.graphs import EagerGraph, GraphRuntime
from vllm_omni.platforms.quarantine import QUARANTINE

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.diffusion,
    pytest.mark.parallel,
    pytest.mark.cpu,
]

SIZE = VideoGeometry(64, 96)
LAYERS = 3
FORWARDS = 4 * LAYERS + LAYERS - 1
"""Blocks that run to their end in a chunk: the last one of a commit does not."""


def config(*, leased: bool, ranks: int = 1, **changes) -> OmniDiffusionConfig:
    return OmniDiffusionConfig(
        model=str(tiny_checkpoint_dir()),
        executor="mp" if ranks > 1 else "inline",
        parallel=DiffusionParallelConfig(ulysses_degree=ranks),
        leased_post_attention=leased,
        **{"dtype": "bfloat16", "geometry": SIZE} | changes,
    )


def same(one: RankRollout, two: RankRollout) -> bool:
    pairs = [*zip(one.outputs, two.outputs, strict=True)]
    for parts in ("window", "text"):
        for ours, theirs in zip(vars(one)[parts], vars(two)[parts], strict=True):
            pairs += zip(ours, theirs, strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rollout_with_graphs_has_the_bytes_of_one_without(ranks):
    """Over a filling and rolling window and a prompt that moves; keys and values included."""
    parallel = DiffusionParallelConfig(ulysses_degree=ranks)
    leased = run_ranks(roll, config(leased=True, ranks=ranks), parallel=parallel)
    plain = run_ranks(roll, config(leased=False, ranks=ranks), parallel=parallel)
    assert len(leased[0].outputs) == NUM_CHUNKS
    assert all(same(a, b) for a, b in zip(leased, plain, strict=True))


def count_leases(state: ParallelState, settings: OmniDiffusionConfig) -> LeaseRecord:
    seen = []
    prepare = LeasedPostAttention.prepare

    def remember(leases, blocks):
        seen.append(leases)
        prepare(leases, blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LeasedPostAttention, "prepare", remember)
        roll(state, settings, num_chunks=2)
    return seen[0].record


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_block_of_every_forward_replays_and_the_exchange_writes_in_place(ranks):
    parallel = DiffusionParallelConfig(ulysses_degree=ranks)
    for record in run_ranks(count_leases, config(leased=True, ranks=ranks), parallel=parallel):
        assert record.captures == 2 * LAYERS
        assert record.replays == record.producer_writes == 2 * FORWARDS
        assert (record.projection_copy_bytes == 0) is (ranks > 1)
        assert record.fallbacks == 0


@pytest.fixture
def executor():
    made = InlineExecutor(config(leased=True, max_num_seqs=2))
    made.start()
    yield made
    made.shutdown()


def record_of(executor) -> LeaseRecord:
    return executor.worker.pipeline.model.transformer.post_attention.record


def rollout(executor, name, **request):
    executor.open_session(name, small_request(num_chunks=4, **request))
    chunks = make_chunks(executor, name, range(4), PROMPTS)
    executor.close_session(name)
    return [chunk.data.tobytes() for chunk in chunks]


def test_a_session_that_is_opened_again_gets_the_same_bytes(executor):
    assert rollout(executor, "first") == rollout(executor, "second")
    assert record_of(executor).captures == 2 * LAYERS


def test_sessions_that_take_turns_do_not_disturb_each_other(executor):
    alone = rollout(executor, "alone", seed=1)
    executor.open_session("a", small_request(num_chunks=4, seed=1))
    executor.open_session("b", small_request(num_chunks=4, seed=2))
    turns = []
    for index in range(4):
        turns += make_chunks(executor, "a", range(index, index + 1), PROMPTS)
        make_chunks(executor, "b", range(index, index + 1))
    assert [chunk.data.tobytes() for chunk in turns] == alone


def test_a_session_of_another_size_runs_without_graphs_and_says_so(executor, caplog):
    with caplog.at_level(logging.INFO):
        other = rollout(executor, "other", height=48, width=64)
    assert record_of(executor).replays == 0
    assert record_of(executor).fallbacks == 1
    assert "runs without post-attention graphs" in caplog.text
    plain = InlineExecutor(config(leased=False, max_num_seqs=2))
    plain.start()
    assert rollout(plain, "other", height=48, width=64) == other
    plain.shutdown()


def test_forwards_that_are_captured_themselves_replay_nothing(executor, monkeypatch):
    replayed = rollout(executor, "replayed")
    replays = record_of(executor).replays
    monkeypatch.setattr(GraphRuntime, "is_capturing", lambda _: True)
    assert rollout(executor, "captured") == replayed
    assert record_of(executor).replays == replays


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enforce_eager": False}, "enforce_eager"),
        ({"geometry": None}, "ar_diffusion_height"),
        ({"dtype": "float32"}, "bfloat16 projection"),
    ],
)
def test_settings_that_do_not_go_with_graphs_are_refused_at_the_start(changes, message):
    with pytest.raises(ConfigError, match=message):
        InlineExecutor(config(leased=True, **changes)).start()


def test_without_the_setting_there_are_no_graphs():
    executor = InlineExecutor(config(leased=False))
    executor.start()
    assert executor.worker.pipeline.model.transformer.post_attention is EAGER
    executor.shutdown()


def test_a_failed_replay_loses_the_worker_keeps_its_memory_and_is_relaunched(monkeypatch):
    supervisor = WorkerSupervisor(
        lambda: InlineExecutor(config(leased=True)), warm_up=None, sleep=lambda _: None
    )
    supervisor.start()
    supervisor.executor.open_session("lost", small_request(num_chunks=2))
    replays = []
    replay = EagerGraph.replay

    def fail_once(graph):
        replays.append(graph)
        if len(replays) == LAYERS + 1:
            raise RuntimeError("injected device error")
        replay(graph)

    monkeypatch.setattr(EagerGraph, "replay", fail_once)
    held_before = QUARANTINE.size
    with pytest.raises(WorkerFailedError, match="workers have to be restarted"):
        make_chunks(supervisor.executor, "lost", range(1))
    (held,) = QUARANTINE.held[held_before:]
    for kind in (LeasedPostAttention, SessionSetup, CommittedState, ChunkContext):
        assert any(isinstance(owner, kind) for owner in held.owners)
    assert "injected device error" in held.reason
    (lease,) = [owner for owner in held.owners if isinstance(owner, Lease)]
    assert lease.slot.active
    with pytest.raises(WorkerFailedError, match="restart all workers"):
        supervisor.executor.open_session("refused", small_request(num_chunks=2))
    supervisor.relaunch()
    supervisor.executor.open_session("next", small_request(num_chunks=2))
    assert len(make_chunks(supervisor.executor, "next", range(2))) == 2
    supervisor.shutdown()


def main_whose_replays_fail(task: WorkerTask, pipe: Connection, pixels: SharedBytes) -> None:
    """A worker process in which the session ``lost`` fails on rank 1, in its second block."""
    from vllm_omni.diffusion.models.lingbot_world.pipeline import LingBotWorldCausalDMDPipeline

    denoise, replay = LingBotWorldCausalDMDPipeline.denoise_chunk, EagerGraph.replay
    left = []

    def denoise_chunk(pipeline, session, plan):
        left[:] = [1, 0] if (plan.session_id, task.rank) == ("lost", 1) else []
        return denoise(pipeline, session, plan)

    def replay_or_fail(graph):
        if left and left.pop(0) == 0:
            raise RuntimeError("injected device error")
        replay(graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LingBotWorldCausalDMDPipeline, "denoise_chunk", denoise_chunk)
        patch.setattr(EagerGraph, "replay", replay_or_fail)
        process.main(task, pipe, pixels)


def test_a_failed_replay_ends_the_process_group_and_a_new_one_makes_the_same_bytes():
    """One rank of two fails in a block, while the other one waits for it in the next exchange."""
    supervisor = WorkerSupervisor(
        lambda: MultiprocExecutor(
            config(leased=True, ranks=2), worker_main=main_whose_replays_fail
        ),
        warm_up=None,
        sleep=lambda _: None,
    )
    supervisor.start()
    expected = rollout(supervisor.executor, "first")
    supervisor.executor.open_session("lost", small_request(num_chunks=2))
    lost = r"rank 1 ended with exit code 1 after .*injected device error.*have to be restarted"
    with pytest.raises(WorkerFailedError, match=lost):
        make_chunks(supervisor.executor, "lost", range(1))
    supervisor.relaunch()
    assert rollout(supervisor.executor, "first") == expected
    supervisor.shutdown()


def fail_in_the_exchange_back(state: ParallelState, settings: OmniDiffusionConfig):
    """The exchange that writes into a lease raises on every rank; what is kept afterwards."""
    import torch.distributed as dist

    worker = Worker(settings, local_rank=state.control.rank, parallel=state)
    worker.open_session("lost", small_request(num_chunks=1))
    exchange, calls = dist.all_to_all_single, []

    def fail_the_third(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 3:  # heads went out in the first two, attention comes back in the third
            raise RuntimeError("injected exchange failure")
        return exchange(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", fail_the_third)
        with pytest.raises(PeersLeftWaitingError) as caught:
            worker.run_chunk(ChunkPlan("lost", 0), lambda _: None)
    (held,) = QUARANTINE.held
    transformer = worker.pipeline.model.transformer
    exchange_is_kept = any(owner is transformer.exchange for owner in held.owners)
    record = transformer.post_attention.record
    failure = caught.value.__cause__
    assert isinstance(failure, WorkerFailedError)
    return str(failure.__cause__), record.failed, exchange_is_kept, record.replays


def test_a_failed_exchange_into_a_lease_keeps_its_buffers_and_asks_for_a_restart():
    parallel = DiffusionParallelConfig(ulysses_degree=2)
    for cause, failed, exchange_is_kept, replays in run_ranks(
        fail_in_the_exchange_back, config(leased=True, ranks=2), parallel=parallel
    ):
        assert cause == "injected exchange failure"
        assert failed
        assert exchange_is_kept
        assert replays == 0
