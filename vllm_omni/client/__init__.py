"""A client of live worlds: open one on a running server, steer it, and read its video. No torch.

    async with WorldClient("http://127.0.0.1:8000") as world:
        await world.start("first.png", "A quiet harbour at dawn.", num_frames=45)
        await world.steer(keys="w")
        async for chunk in world:
            print(chunk.index, len(chunk.data))
        world.save("world.mp4")

:class:`SyncWorldClient` is the same for programs without an event loop.
"""

from vllm_omni.client.camera import Pose
from vllm_omni.client.errors import (
    CannotConnectError,
    ConnectionLostError,
    EventRefusedError,
    KeyRefusedError,
    ProtocolError,
    WorldError,
    WorldRefusedError,
)
from vllm_omni.client.sync import SyncWorldClient
from vllm_omni.client.world import Chunk, WorldClient

__all__ = [
    "CannotConnectError",
    "Chunk",
    "ConnectionLostError",
    "EventRefusedError",
    "KeyRefusedError",
    "Pose",
    "ProtocolError",
    "SyncWorldClient",
    "WorldClient",
    "WorldError",
    "WorldRefusedError",
]
