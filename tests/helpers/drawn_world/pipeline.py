"""The pipeline of the drawn world: stripes that pass as the camera walks and turns."""

import zlib
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float64, Shaped, UInt8

from vllm_omni.diffusion.camera_motion import integrate_keys
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import ExchangeTraffic, ParallelState
from vllm_omni.diffusion.geometry import VideoGeometry, chunk_pixel_frames
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    ChunkTimings,
    OutputKind,
    RecordedCamera,
    ScriptedKeys,
    SessionRequest,
)
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import KVPool
from vllm_omni.experimental.ar_diffusion.kv_cache.window import KVCacheSpec
from vllm_omni.platforms import Platform


@dataclass(slots=True)
class DrawnSession:
    """Where one world is: its next chunk and its camera, and what the next commit makes of them."""

    request: SessionRequest
    hue: int
    chunk: int = 0
    pose: Float64[np.ndarray, "4 4"] = field(default_factory=lambda: np.eye(4))
    pitch_rad: float = 0.0
    after: tuple[Float64[np.ndarray, "4 4"], float] | None = None

    def close(self) -> None:
        """There is nothing to free."""


class NoLaps:
    """Drawing takes no time worth telling."""

    def timings(self) -> ChunkTimings:
        """Return zeros."""
        return ChunkTimings()


class DrawnWorld:
    """A ``RealtimePipeline``: a chunk follows from the request, the plan and the pose before it."""

    dtype = torch.float32
    attention_kernel = "none"

    def __init__(self, page_tokens: int) -> None:
        self.traffic = ExchangeTraffic()
        self._spec = KVCacheSpec(
            num_layers=1, num_kv_heads=1, text_heads=1, head_dim=1, window_frames=18,
            sink_frames=9, text_tokens=1, element_bytes=4, page_tokens=page_tokens,
        )  # fmt: skip

    def kv_cache_spec(self) -> KVCacheSpec:
        return self._spec

    def state_bytes(self, geometry: VideoGeometry) -> int:
        return geometry.tokens_per_frame

    def workspace_bytes(self, geometry: VideoGeometry) -> int:
        return 12 * 3 * geometry.height * geometry.width

    def activation_bytes(self, _geometry: VideoGeometry) -> int:
        return 0

    def weight_bytes(self) -> dict[str, int]:
        return {}

    def bind_pool(self, pool: KVPool) -> None:
        """A world that is drawn remembers nothing."""

    def open_session(self, _session_id: str, request: SessionRequest) -> DrawnSession:
        picture = request.image.signed if request.image.rgb is None else request.image.rgb
        seen = request.seed + int(np.asarray(picture, np.float64).sum())
        return DrawnSession(request, hue=(zlib.crc32(request.prompt.text.encode()) + seen) % 256)

    def denoise_chunk(
        self, session: DrawnSession, plan: ChunkPlan
    ) -> tuple[Shaped[torch.Tensor, "..."], NoLaps]:
        if plan.prompt is not None:
            session.hue = zlib.crc32(plan.prompt.prompt.text.encode()) % 256
        poses, pitch_rad = _poses(session, plan)
        session.after = poses[-1], pitch_rad
        request = session.request
        if request.output is OutputKind.LATENT:
            shape = (1, 16, 3, request.height // 8, request.width // 8)
            return torch.full(shape, float(session.hue)), NoLaps()
        frames = chunk_pixel_frames(session.chunk)
        # The first latent frame of a rollout is one pixel frame, each later one is four.
        latent = [(12 - frames + index) // 4 for index in range(frames)]
        drawn = [_draw(request, poses[at], session.hue) for at in latent]
        pixels = torch.from_numpy(np.stack(drawn))
        return (pixels if request.output is OutputKind.UINT8 else pixels.float() / 255), NoLaps()

    def commit_chunk(self, session: DrawnSession) -> ChunkTimings:
        assert session.after is not None, "a chunk is denoised before it is committed"
        session.pose, session.pitch_rad = session.after
        session.chunk += 1
        return ChunkTimings()

    def release(self) -> None:
        """There is nothing to free."""


def load_pipeline(
    config: OmniDiffusionConfig,
    *,
    platform: Platform,  # noqa: ARG001
    device: torch.device,  # noqa: ARG001
    parallel: ParallelState,  # noqa: ARG001
) -> DrawnWorld:
    """Make the pipeline of the only rank."""
    return DrawnWorld(config.kv_cache.page_tokens)


def _poses(session: DrawnSession, plan: ChunkPlan) -> tuple[Float64[np.ndarray, "3 4 4"], float]:
    camera = session.request.camera
    if isinstance(camera, ScriptedKeys):
        return integrate_keys(camera.chunks[plan.chunk_index], session.pose, session.pitch_rad)
    if isinstance(camera, RecordedCamera):
        first = 12 * plan.chunk_index
        return camera.poses[first : first + 9 : 4].astype(np.float64), 0.0
    assert plan.poses is not None, "a live camera's plan has poses"
    return plan.poses, 0.0


def _draw(
    request: SessionRequest, pose: Float64[np.ndarray, "4 4"], hue: int
) -> UInt8[np.ndarray, "height width 3"]:
    """Stripes across the view: they pass by as the camera turns, and grow as it walks."""
    yaw = np.arctan2(pose[0, 2], pose[2, 2])
    columns = np.linspace(-0.5, 0.5, request.width) + yaw
    rows = np.linspace(0.0, 1.0, request.height)[:, None]
    red = 127 + 127 * np.sin(20 * columns + pose[0, 3]) * np.ones_like(rows)
    green = 127 + 127 * np.sin(20 * rows + 8 * pose[2, 3]) * np.ones_like(columns)
    return np.stack([red, green, np.full_like(red, hue)], axis=-1).astype(np.uint8)
