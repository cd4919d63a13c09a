"""Engine events to outputs of the Python API."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Shaped

from vllm_omni.diffusion.messages import ChunkTimings, OutputKind, SessionRequest
from vllm_omni.engine.session import ChunkReady
from vllm_omni.outputs import OmniRequestOutput

_MIB = 2**20
_LATENT_AXES = 5


def chunk_output(
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
class ClipCollector:
    """Gathers the chunks of a rollout into one clip.

    The request alone says what the clip is made of: latents, float32 frames, or uint8 frames,
    which a clip has only where PIL pictures were asked for (see ``EngineClient.parse``).
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


def stage_seconds(timings: ChunkTimings) -> dict[str, float]:
    """Durations of a chunk's parts until its pixels leave, which is before its commit."""
    return {
        "condition": timings.condition_ms / 1000.0,
        "camera": timings.camera_ms / 1000.0,
        "probes": timings.probes_ms / 1000.0,
        "decode": timings.decode_ms / 1000.0,
    }
