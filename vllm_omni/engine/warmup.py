"""The throw-away session that makes the first real one as fast as the second."""

import numpy as np

from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, VideoGeometry
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    LiveCamera,
    OutputKind,
    SessionRequest,
    SourceImage,
    WorkerReady,
)

_SESSION_ID = "warm-up"


def warm_up_request(geometry: VideoGeometry) -> SessionRequest:
    """A grey picture and a still camera at a configured size."""
    return SessionRequest(
        prompt="warm-up",
        image=SourceImage(rgb=np.full((geometry.height, geometry.width, 3), 127, np.uint8)),
        height=geometry.height,
        width=geometry.width,
        num_chunks=None,
        seed=0,
        camera=LiveCamera(),
        output=OutputKind.UINT8,
    )


def warm_up_plans(ready: WorkerReady) -> list[ChunkPlan]:
    """Chunks until the window is full and has rolled once."""
    filling = -(-ready.window_frames // LATENT_FRAMES_PER_CHUNK)
    still = np.broadcast_to(np.eye(4), (LATENT_FRAMES_PER_CHUNK, 4, 4)).copy()
    return [ChunkPlan(_SESSION_ID, index, poses=still) for index in range(filling + 2)]
