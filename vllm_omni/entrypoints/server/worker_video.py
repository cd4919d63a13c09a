"""The server's end of video that a worker makes."""

import numpy as np
from jaxtyping import UInt8

from vllm_omni.outputs.media import ChunkEncoder


class WorkerVideo:
    """Stands for the encoder of a world whose chunks come as video."""

    def encode(self, video: UInt8[np.ndarray, " bytes"]) -> bytes:
        """Return the video of a chunk as it came; raise RuntimeError if the worker had none."""
        if not len(video):
            raise RuntimeError("the encoder of a worker failed; the worker's log says why")
        return video.tobytes()

    def finish(self) -> bytes:
        """Return what the encoder still holds, which is nothing after whole chunks."""
        return b""

    def close(self) -> None:
        """Do nothing: the worker frees its encoder with the session."""


LiveVideo = ChunkEncoder | WorkerVideo
"""What makes bytes for the client of what the engine hands out."""
