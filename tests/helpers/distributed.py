"""Runs a function on several ranks, each a process with real gloo groups."""

import io
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from vllm_omni import envs
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.distributed.parallel_state import (
    ParallelState,
    WorldPlace,
    join_world,
    leave_world,
)
from vllm_omni.diffusion.executor.worker_group import PRELOADED
from vllm_omni.diffusion.registry import LINGBOT_WORLD

RankFunction = Callable[..., Any]
"""A module-level function of a :class:`ParallelState` and the arguments of :func:`run_ranks`."""


def run_ranks(
    function: RankFunction,
    *arguments: Any,
    parallel: DiffusionParallelConfig,
    timeout_s: float = 100.0,
) -> list[Any]:
    """Call ``function(state, *arguments)`` on every rank and return the results by rank.

    Raises:
        AssertionError: if a rank raised; its traceback is in the captured output.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *LINGBOT_WORLD.preload])
    with tempfile.TemporaryDirectory(prefix="test-ranks-") as directory:
        pipes, processes = [], []
        for rank in range(parallel.world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(theirs, rank, directory, parallel, function, arguments)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, timeout_s)
        finally:
            for process in processes:
                process.join(5.0)
                process.kill()
                process.join()


def _collect(pipes: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline_s = time.monotonic() + timeout_s
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, max(0.0, deadline_s - time.monotonic()))
        assert ready, f"ranks {sorted(set(range(len(pipes))) - set(results))} did not answer"
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                message = pipe.recv_bytes()
            except EOFError:
                raise AssertionError(f"rank {rank} raised, see its traceback") from None
            results[rank] = torch.load(io.BytesIO(message), weights_only=False)
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    pipe: Connection,
    rank: int,
    directory: str,
    parallel: DiffusionParallelConfig,
    function: RankFunction,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    envs.prefer_interface("lo")
    state: ParallelState = join_world(
        WorldPlace(
            rank=rank,
            tensor_parallel_size=parallel.tensor_parallel_size,
            sequence_parallel_size=parallel.ulysses_degree,
            rendezvous=directory,
            backend="gloo",
            device=torch.device("cpu"),
            timeout_s=60.0,
        )
    )
    message = io.BytesIO()
    torch.save(function(state, *arguments), message)
    pipe.send_bytes(message.getvalue())
    leave_world()
