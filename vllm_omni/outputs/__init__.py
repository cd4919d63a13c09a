"""What a request gives back: one output for a clip, or one per chunk of a stream."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class OmniRequestOutput:
    """A finished clip, or one chunk of a stream.

    Attributes:
        request_id: as the caller gave it.
        prompt: as the caller gave it.
        finished: whether this is the last output of the request.
        final_output_type: "video".
        images: one entry. A clip is float32 in [0, 1], ``[frames, height, width, 3]``; a chunk
            is uint8 in the same layout; a latent is ``[1, 16, 3 per chunk, height / 8,
            width / 8]`` in float32.
        latents: the latent again, where latents were asked for.
        multimodal_output: for a chunk, ``video`` and ``metadata`` with ``ar_diffusion`` and
            ``stream``.
        metrics: seconds and counts by name.
        stage_durations: seconds by stage.
        peak_memory_mb: of the device, or of the process where the device is the CPU.
        error: text where the request failed.
        error_status_code: its HTTP status.
        error_type: its class name.
    """

    request_id: str
    prompt: object | None = None
    finished: bool = True
    stage_id: int | None = None
    replica_id: int | None = None
    final_output_type: str = "video"
    images: list[object] = field(default_factory=list)
    latents: object | None = None
    trajectory_latents: object | None = None
    trajectory_timesteps: object | None = None
    trajectory_decoded: object | None = None
    multimodal_output: dict[str, object] = field(default_factory=dict)
    custom_output: dict[str, object] = field(default_factory=dict)
    metrics: dict[str, object] = field(default_factory=dict)
    stage_durations: dict[str, float] = field(default_factory=dict)
    peak_memory_mb: float = 0.0
    error: str | None = None
    error_status_code: int | None = None
    error_type: str | None = None
