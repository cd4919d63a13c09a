"""Workers that fail on demand: a session's id says how, in which chunk and on which rank.

``oom:1:0`` runs out of memory in chunk 1 on rank 0; ``bug``, ``hang`` and ``die`` raise, sleep
and kill the process; ``full:0:1`` finds no pages on rank 1 when it is opened. Sessions with other
ids run as always.
"""

import os
import signal
import sys
import time

import pytest

from vllm_omni.diffusion.executor.conversation import RankConversation
from vllm_omni.diffusion.executor.worker_group import WorkerGroup
from vllm_omni.diffusion.messages import GroupCapacity
from vllm_omni.diffusion.worker import process
from vllm_omni.diffusion.worker.process import (
    Done,
    ExecutorPipe,
    Loading,
    PixelMemory,
    Refused,
    Stop,
    WorkerTask,
)
from vllm_omni.errors import (
    CheckpointError,
    OmniError,
    OutOfKVMemoryError,
    SessionFailedError,
    WorkerFailedError,
)

HANG_S = 600.0


def faulty_main(task: WorkerTask, pipe: ExecutorPipe, pixels: PixelMemory) -> None:
    """A worker process with the faults built in."""
    install_faults(pytest.MonkeyPatch())
    process.main(task, pipe, pixels)


def telling_main(task: WorkerTask, pipe: ExecutorPipe, _pixels: PixelMemory) -> None:
    """Refuse to start, and tell what the process found when it began."""
    found = f"torch loaded: {'torch' in sys.modules}, marker: {os.environ.get('FAULTS_MARKER')}"
    pipe.send(Refused(CheckpointError(f"rank {task.rank}: {found}")))


def refusing_main(task: WorkerTask, pipe: ExecutorPipe, _pixels: PixelMemory) -> None:
    """The rank that ``REFUSING_RANK`` names refuses to start and ends, the other loads for ever."""
    if task.rank == int(os.environ["REFUSING_RANK"]):
        pipe.send(Refused(CheckpointError(f"rank {task.rank} found another model")))
    else:
        time.sleep(HANG_S)


def silent_main(_task: WorkerTask, _pipe: ExecutorPipe, _pixels: PixelMemory) -> None:
    """Load for ever."""
    time.sleep(HANG_S)


def slow_main(_task: WorkerTask, pipe: ExecutorPipe, _pixels: PixelMemory) -> None:
    """Weights arrive for five seconds, with news of them; then the rank is ready."""
    for _ in range(10):
        time.sleep(0.5)
        pipe.send(Loading())
    pipe.send(Done(GroupCapacity(1, num_pages=1, page_tokens=1, page_bytes=1, window_frames=1)))
    pipe.recv()


def disagreeing_main(task: WorkerTask, pipe: ExecutorPipe, _pixels: PixelMemory) -> None:
    """Rank 0 is ready and rank 1 refuses; in a command, each has a reason of its own."""
    reasons: tuple[OmniError, OmniError] = (SessionFailedError("a bug"), WorkerFailedError("dead"))
    ready = GroupCapacity(sessions=1, num_pages=1, page_tokens=1, page_bytes=1, window_frames=1)
    if os.environ["REFUSING_RANK"] == str(task.rank):
        pipe.send(Refused(OutOfKVMemoryError("no room on this rank")))
        return
    pipe.send(Done(ready))
    while not isinstance(pipe.recv(), Stop):
        pipe.send(Refused(reasons[task.rank]))


def process_ids(group: RankConversation) -> tuple[int, ...]:
    """Ids of the processes of a running group, by rank."""
    if not isinstance(group, WorkerGroup):
        return tuple(berth.process_id for berth in group.berths)
    return tuple(worker.process.pid for worker in group._workers if worker.process.pid is not None)


def install_faults(patch: pytest.MonkeyPatch) -> None:
    """Let chunks fail after their probes, when the window already holds noisy keys."""
    from vllm_omni.diffusion.models.lingbot_world.pipeline import LingBotWorldCausalDMDPipeline

    denoise, open_ = (
        LingBotWorldCausalDMDPipeline.denoise_chunk,
        LingBotWorldCausalDMDPipeline.open_session,
    )

    def open_session(self, session_id, request):
        _fail_if_asked(session_id, 0, opening=True)
        return open_(self, session_id, request)

    def denoise_chunk(self, session, plan):
        output = denoise(self, session, plan)
        _fail_if_asked(plan.session_id, plan.chunk_index)
        return output

    patch.setattr(LingBotWorldCausalDMDPipeline, "denoise_chunk", denoise_chunk)
    patch.setattr(LingBotWorldCausalDMDPipeline, "open_session", open_session)


def _fail_if_asked(session_id: str, chunk_index: int, *, opening: bool = False) -> None:
    import torch
    import torch.distributed as dist

    if session_id.count(":") != 2:
        return
    fault, chunk, rank = session_id.split(":")
    here = dist.get_rank() if dist.is_initialized() else 0
    if (int(chunk), int(rank), fault == "full") != (chunk_index, here, opening):
        return
    if fault == "full":
        raise OutOfKVMemoryError("injected")
    if fault == "oom":
        raise torch.OutOfMemoryError("injected")
    if fault == "bug":
        raise RuntimeError("injected")
    if fault == "hang":
        time.sleep(HANG_S)
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
