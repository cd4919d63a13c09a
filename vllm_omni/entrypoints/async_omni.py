"""The asynchronous Python API: rollouts as async generators, interactions, abort."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Shaped

from vllm_omni.config.resolve import resolve
from vllm_omni.diffusion.messages import OutputKind, SessionRequest
from vllm_omni.engine.session import ChunkReady, Ended, EndReason, StopCause
from vllm_omni.entrypoints.engine_client import EngineClient, EventQueue, stage_seconds
from vllm_omni.envs import detect_platform
from vllm_omni.errors import InvalidRequestError, SessionClosedError
from vllm_omni.inputs.checking import validate
from vllm_omni.inputs.data import NAMES, OmniDiffusionSamplingParams, rollout_fields
from vllm_omni.inputs.interaction import Interaction, control_event
from vllm_omni.outputs import OmniRequestOutput

_MIB = 2**20
_LATENT_AXES = 5


class AsyncOmni:
    """Generates worlds. The engine starts on construction and ends with :meth:`shutdown`.

    Args:
        model: checkpoint directory, or hub id in the local cache.
        deploy_config: deploy YAML; without it a request gives one output for the whole clip.
        stage_overrides: ``{"0": {...}}``, as a mapping or JSON.
        kwargs: any setting of the engine by its deploy name.

    Raises:
        ConfigError: settings that cannot be honoured; nothing was loaded.
        CheckpointError: a checkpoint that is not this model.
    """

    def __init__(
        self,
        model: str,
        *,
        deploy_config: str | None = None,
        stage_overrides: Mapping[str, object] | str | None = None,
        **kwargs: object,
    ) -> None:
        self._client = EngineClient.create(
            resolve(
                model,
                deploy_config=deploy_config,
                overrides=kwargs,
                stage_overrides=stage_overrides,
                platform=detect_platform(),
            ),
            model_name=model,
            warm_up=deploy_config is not None,
        )
        self._door = self._client.door(NAMES)
        self._session_ids: dict[str, str] = {}
        self.on_chunk: Callable[[], object] = lambda: None  # nobody shows progress
        self._client.engine.start()

    @property
    def client(self) -> EngineClient:
        """The engine and its deployment."""
        return self._client

    async def generate(
        self,
        prompt: object,
        sampling_params: OmniDiffusionSamplingParams | None = None,
        request_id: str = "",
        *,
        sampling_params_list: list[OmniDiffusionSamplingParams] | None = None,
        output_modalities: Sequence[str] | None = None,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Make one rollout: one output per chunk when streaming, else one for the clip.

        Leaving the generator early ends the session.

        Args:
            output_modalities: ``["video"]``, the only one there is, or ``None``.

        Raises:
            InvalidRequestError: before any model work.
            OmniError: what ended the session.
        """
        params = _single_params(sampling_params, sampling_params_list)
        if output_modalities is not None and list(output_modalities) != ["video"]:
            raise InvalidRequestError(
                f'must be ["video"], got {output_modalities!r:.100}', field="output_modalities"
            )
        request_id = request_id or f"video-{uuid.uuid4().hex}"
        request = await asyncio.to_thread(self.request, prompt, params)
        if request_id in self._session_ids:
            raise InvalidRequestError(f"request_id {request_id!r} is running")
        collector = None
        if not self._client.deployment.streaming_output:
            collector = _ClipCollector(request)
        events = EventQueue()
        session_id = self._client.engine.open(request, events.put, request_id=request_id)
        self._session_ids[request_id] = session_id
        try:
            while not isinstance(event := await events.get(), Ended):
                if not isinstance(event, ChunkReady):
                    continue
                self.on_chunk()
                if collector is None:
                    yield _chunk_output(request_id, session_id, prompt, event)
                else:
                    collector.add(event)
                self._client.engine.delivered(session_id)
            if event.error is not None:
                raise event.error
            if collector is not None and event.reason is EndReason.FINISHED:
                yield await asyncio.to_thread(
                    collector.output, request_id, prompt, event.peak_bytes
                )
        finally:
            self._client.engine.stop(session_id)
            del self._session_ids[request_id]

    def request(self, prompt: object, params: OmniDiffusionSamplingParams) -> SessionRequest:
        """Check a request, then decode its picture and read its camera."""
        request = self._door.check(rollout_fields(prompt, params))
        return self._door.complete(request, self._door.picture(request.image))

    async def abort(self, request_id: str) -> None:
        """End a request at its next chunk boundary; its generator ends without an error."""
        if request_id in self._session_ids:
            self._client.engine.stop(self._session_ids[request_id], StopCause.ABORTED)

    async def submit_interaction_async(
        self, request_id: str, interaction: Mapping[str, object]
    ) -> str:
        """Steer a running request from its next chunk on.

        Args:
            interaction: ``{"event_id": ..., "event": {...}, "transition_chunks": ...}``.

        Returns:
            The event's id, made up where none was given.

        Raises:
            SessionClosedError: if no such request runs.
            InvalidRequestError: if the event cannot be applied.
        """
        if request_id not in self._session_ids:
            raise SessionClosedError(f"no request {request_id!r} is running")
        session_id = self._session_ids[request_id]
        event = await asyncio.to_thread(
            control_event,
            validate(Interaction, interaction),
            self._client.model.modalities,
            self._client.tokenize,
        )
        self._client.engine.submit(session_id, event)
        return event.event_id

    def shutdown(self) -> None:
        """End all sessions and the workers; a second call does nothing."""
        self._client.engine.close()


def _single_params(
    params: OmniDiffusionSamplingParams | None, listed: list[OmniDiffusionSamplingParams] | None
) -> OmniDiffusionSamplingParams:
    if listed is not None:
        if params is not None or len(listed) != 1:
            raise InvalidRequestError(
                "this pipeline has one stage: give one sampling_params, or a "
                f"sampling_params_list of one, got {len(listed)}",
                field="sampling_params_list",
            )
        return listed[0]
    return params or OmniDiffusionSamplingParams()


def _chunk_output(
    request_id: str, session_id: str, prompt: object, event: ChunkReady
) -> OmniRequestOutput:
    """One chunk of a stream.

    Inside, the ids of session and request are the same: the caller's with a unique end.
    """
    unique_id = f"{request_id}-{session_id}"
    result, receipt = event.result, event.receipt
    latent = result.data.ndim == _LATENT_AXES
    payload = _tensor(result.data) if latent else result.data
    metadata = {
        "ar_diffusion": {
            "session_id": unique_id,
            "request_id": unique_id,
            "chunk_index": result.chunk_index,
            "applied_event_ids": list(receipt.applied),
        },
        "stream": {
            "generation_chunk_index": result.chunk_index,
            "started_event_ids": list(receipt.started),
            "active_event_ids": list(receipt.active),
            "completed_event_ids": list(receipt.completed),
        },
    }
    return OmniRequestOutput(
        request_id=request_id,
        prompt=prompt,
        finished=event.last,
        stage_id=0,
        images=[payload],
        latents=payload if latent else None,
        multimodal_output={"metadata": metadata} | ({} if latent else {"video": payload}),
        stage_durations=stage_seconds(result.timings),
    )


@dataclass(slots=True)
class _ClipCollector:
    """Gathers the chunks of a rollout into one clip.

    The request alone says what the clip is made of: latents, float32 frames, or uint8 frames,
    which a clip has only where PIL pictures were asked for (see ``EngineClient.door``).
    """

    request: SessionRequest
    chunks: list[Shaped[np.ndarray, "..."]] = field(default_factory=list)
    durations: dict[str, float] = field(default_factory=dict)

    def add(self, event: ChunkReady) -> None:
        """Keep the pixels and the timings of one chunk."""
        self.chunks.append(event.result.data)
        for name, seconds in stage_seconds(event.result.timings).items():
            self.durations[name] = self.durations.get(name, 0.0) + seconds

    def output(self, request_id: str, prompt: object, peak_bytes: int) -> OmniRequestOutput:
        """Join the chunks into the output of the whole clip."""
        latent = self.request.output is OutputKind.LATENT
        payload: object = np.concatenate(self.chunks, axis=2 if latent else 0)
        if latent:
            payload = _tensor(payload)
        elif self.request.output is OutputKind.UINT8:
            payload = _pictures(payload)
        return OmniRequestOutput(
            request_id=request_id,
            prompt=prompt,
            finished=True,
            stage_id=0,
            images=[payload],
            latents=payload if latent else None,
            metrics={"num_chunks": len(self.chunks)},
            stage_durations=self.durations,
            peak_memory_mb=peak_bytes / _MIB,
        )


def _tensor(latent: Shaped[np.ndarray, "..."]) -> object:
    """Make latents a tensor; torch is loaded only where latents are asked for."""
    import torch

    return torch.from_numpy(latent)


def _pictures(clip: Shaped[np.ndarray, "frames height width 3"]) -> list[object]:
    from PIL import Image

    return [Image.fromarray(frame) for frame in clip]
