"""The video of a world, decoded part by part as it comes."""

import io

import av
import numpy as np
from jaxtyping import UInt8


class FrameDecoder:
    """Decodes the parts of one fragmented MP4, each of which needs those before it.

    Only H.264 without reordering is expected, as the server sends it: each part then gives all of
    its frames at once.
    """

    def __init__(self) -> None:
        self._header = b""
        self._decoder: av.VideoCodecContext | None = None

    def decode(self, part: bytes) -> UInt8[np.ndarray, "frames height width 3"]:
        """Pixel frames of the next part; the first one carries the description of the video."""
        if not self._header:
            self._header = part[: part.index(b"moof") - 4]
            part = part[len(self._header) :]
        frames = []
        with av.open(io.BytesIO(self._header + part), "r", format="mp4") as container:
            stream = container.streams.video[0]
            if self._decoder is None:
                self._decoder = av.VideoCodecContext.create("h264", "r")
                self._decoder.extradata = stream.codec_context.extradata
                self._decoder.thread_count = 1  # several threads hold frames back
            for packet in container.demux(stream):
                if packet.size:
                    frames += self._decoder.decode(packet)
        return np.stack([frame.to_ndarray(format="rgb24") for frame in frames])
