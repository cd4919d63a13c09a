"""An engine with its deployment: what the Python classes and the server have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from prometheus_client import PlatformCollector, ProcessCollector

from vllm_omni.config.resolve import ResolvedDeployment
from vllm_omni.diffusion.executor import connect, create_executor
from vllm_omni.diffusion.messages import ChunkTimings, OutputKind, TokenizedPrompt
from vllm_omni.diffusion.registry import ModelEntry
from vllm_omni.engine.engine import Engine
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.session import SessionEvent
from vllm_omni.engine.supervisor import WorkerSupervisor, warm_up_request
from vllm_omni.inputs.request import Door, RequestPolicy


@dataclass(frozen=True, slots=True)
class EngineClient:
    """A deployment, its engine, and what prompts are tokenized with, beside the loop of chunks."""

    deployment: ResolvedDeployment
    engine: Engine
    tokenize: Callable[[str], TokenizedPrompt]

    @classmethod
    def create(
        cls, deployment: ResolvedDeployment, *, model_name: str, warm_up: bool
    ) -> EngineClient:
        """Make the engine; nothing is started or loaded. Its metrics hold this process's, too.

        Call this in the main thread before handlers of signals are installed.

        Args:
            model_name: label of the metrics.
            warm_up: whether to warm up before the engine is ready, at the configured size or, where
                blocks are compiled, at the one that they are compiled for.

        Raises:
            CheckpointError: if prompts cannot be tokenized.
        """
        config = deployment.config
        tokenize = deployment.model.load_tokenizer(Path(config.model))
        size = config.geometry if config.enforce_eager else config.prepared_geometry
        request = warm_up_request(size, tokenize("warm-up")) if warm_up and size else None
        connect(config)

        def supervisor_of(replica: int) -> WorkerSupervisor:
            own = config.of_replica(replica)
            return WorkerSupervisor(lambda: create_executor(own), warm_up=request)

        metrics = EngineMetrics(model_name, by_replica=config.replicas.most > 1)
        ProcessCollector(registry=metrics.registry)
        PlatformCollector(registry=metrics.registry)
        engine = Engine(
            supervisor_of, metrics, max_queued=config.max_queued, config=config.replicas
        )
        return cls(deployment, engine, tokenize)

    @property
    def model(self) -> ModelEntry:
        """The model that the engine runs."""
        return self.deployment.model

    def door(self, names: Mapping[str, str], *, max_pixels: int | None = None) -> Door:
        """The way in for requests.

        Args:
            names: fields of a request that its clients know by another name.
            max_pixels: largest size that is served.
        """
        config, streaming = self.deployment.config, self.deployment.streaming_output
        defaults = asdict(self.deployment.default_sampling_params)
        policy = RequestPolicy(
            limits=self.model.limits,
            defaults={name: value for name, value in defaults.items() if value is not None},
            geometry=config.geometry,
            parallel=config.parallel,
            action_root=config.action_root,
            allow_live_camera=streaming or self.deployment.step_execution,
            array_output=OutputKind.UINT8 if streaming else OutputKind.FLOAT,
            max_pixels=max_pixels,
        )
        return Door(
            policy, self.engine.check_fits, self.model.prepare_picture, self.tokenize, names
        )


class EventQueue:
    """Made and read on one event loop; :meth:`put` is the engine's sink.

    It stays short: the engine pauses a session whose chunks nobody takes.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[SessionEvent] = asyncio.Queue()

    def put(self, event: SessionEvent) -> None:
        """Hand over one event, from any thread; without effect once the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            # The reader has gone with its loop, and must not take the engine with it.
            if not self._loop.is_closed():
                raise

    async def get(self) -> SessionEvent:
        """Wait for the next event and return it."""
        return await self._events.get()


def stage_seconds(timings: ChunkTimings) -> dict[str, float]:
    """Durations of a chunk's parts until its pixels leave, which is before its commit."""
    return {
        "condition": timings.condition_ms / 1000.0,
        "camera": timings.camera_ms / 1000.0,
        "probes": timings.probes_ms / 1000.0,
        "decode": timings.decode_ms / 1000.0,
    }
