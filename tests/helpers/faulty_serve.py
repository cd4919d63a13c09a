"""``vllm-omni serve`` with workers that fail on demand: the prompt says how, where and when.

    python -m tests.helpers.faulty_serve MODEL --omni ...

The prompt ``fault oom decode 1`` runs out of memory in the decode of chunk 1. Kinds are ``oom``,
``bug``, ``die`` (SIGKILL) and ``hang``; places are ``open``, ``probe``, ``decode``, ``commit`` and,
where workers encode, ``encode``. Other prompts run as always. The product has no such switch: this
program puts one in.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from vllm_omni.config.resolve import ResolvedDeployment
from vllm_omni.diffusion.executor.multiprocess import MultiprocExecutor
from vllm_omni.diffusion.worker import process
from vllm_omni.diffusion.worker.process import WorkerTask
from vllm_omni.diffusion.worker.shared_bytes import SharedBytes
from vllm_omni.engine.engine import Engine
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.supervisor import WorkerSupervisor, warm_up_request
from vllm_omni.entrypoints.cli import main as command_line
from vllm_omni.entrypoints.engine_client import EngineClient

HANG_S = 600.0


def fault_prompt(kind: str, place: str, chunk: int) -> str:
    """The prompt that asks for a fault."""
    return f"fault {kind} {place} {chunk}"


def faulty_worker(task: WorkerTask, pipe: Connection, pixels: SharedBytes) -> None:
    """A worker process with the faults built in."""
    _install(pytest.MonkeyPatch())
    process.main(task, pipe, pixels)


def _install(patch: pytest.MonkeyPatch) -> None:
    from vllm_omni.diffusion.models.lingbot_world import pipeline
    from vllm_omni.diffusion.models.lingbot_world.text import Prompts
    from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE
    from vllm_omni.outputs.media import ChunkEncoder

    running: list[tuple[str, int]] = [("", 0)]
    prompts: dict[str, str] = {}
    made = pipeline.LingBotWorldCausalDMDPipeline

    def after(owner: object, name: str, place: str) -> None:
        original = vars(owner)[name]

        def wrapped(*args, **kwargs):
            result = original(*args, **kwargs)
            _fail_if_asked(*running[0], place)
            return result

        patch.setattr(owner, name, wrapped)

    open_session, denoise_chunk = made.open_session, made.denoise_chunk

    def opening(self, session_id, request):
        prompts[session_id] = request.prompt.text
        running[0] = (request.prompt.text, 0)
        return open_session(self, session_id, request)

    def denoising(self, session, plan):
        running[0] = (prompts[plan.session_id], plan.chunk_index)
        return denoise_chunk(self, session, plan)

    after(Prompts, "prepare", "open")  # when the window is taken already
    after(pipeline, "denoise", "probe")
    after(WanVAE, "decode", "decode")
    after(pipeline, "commit", "commit")
    after(ChunkEncoder, "encode", "encode")
    patch.setattr(made, "open_session", opening)
    patch.setattr(made, "denoise_chunk", denoising)


def _fail_if_asked(prompt: str, chunk: int, place: str) -> None:
    import torch

    words = prompt.split()
    if len(words) != 4 or words[0] != "fault" or words[2:] != [place, str(chunk)]:
        return
    if words[1] == "oom":
        raise torch.OutOfMemoryError("injected")
    if words[1] == "bug":
        raise RuntimeError("injected secret")
    if words[1] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(HANG_S)


def _create(
    _cls: type[EngineClient], deployment: ResolvedDeployment, *, model_name: str, warm_up: bool
) -> EngineClient:
    config = deployment.config
    tokenize = deployment.model.load_tokenizer(Path(config.model))
    supervisor = WorkerSupervisor(
        lambda: MultiprocExecutor(config, worker_main=faulty_worker),
        warm_up=warm_up_request(config.geometry, tokenize("warm-up")) if warm_up else None,
    )
    engine = Engine(lambda _: supervisor, EngineMetrics(model_name), max_queued=config.max_queued)
    return EngineClient(deployment, engine, tokenize)


if __name__ == "__main__":
    # Workers import this module by its name, not as the main program.
    from tests.helpers import faulty_serve

    pytest.MonkeyPatch().setattr(EngineClient, "create", classmethod(faulty_serve._create))
    sys.argv[1:1] = ["serve"]
    sys.exit(command_line.main())
