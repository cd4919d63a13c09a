"""The asynchronous Python API: rollouts as async generators, interactions, abort."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from vllm_omni.config.resolve import resolve
from vllm_omni.diffusion.messages import SessionRequest
from vllm_omni.engine.session import ChunkReady, Ended, EndReason, StopCause
from vllm_omni.entrypoints.engine_client import EngineClient, EventQueue
from vllm_omni.entrypoints.outputs import ClipCollector, chunk_output
from vllm_omni.envs import detect_platform
from vllm_omni.errors import InvalidRequestError, SessionClosedError
from vllm_omni.inputs.checking import validate
from vllm_omni.inputs.data import NAMES, OmniDiffusionSamplingParams, rollout_fields
from vllm_omni.inputs.interaction import Interaction, control_event
from vllm_omni.outputs import OmniRequestOutput


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
            collector = ClipCollector(request)
        events = EventQueue()
        session_id = self._client.engine.open(request, events.put, request_id=request_id)
        self._session_ids[request_id] = session_id
        try:
            while not isinstance(event := await events.get(), Ended):
                if not isinstance(event, ChunkReady):
                    continue
                self.on_chunk()
                if collector is None:
                    yield chunk_output(request_id, session_id, prompt, event)
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
