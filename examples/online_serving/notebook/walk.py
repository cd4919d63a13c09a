"""A walk, cell by cell, for notebooks and for editors that run what stands between `# %%` lines.

It needs a running server: `make serve-demo`, or `vllm-omni serve` of any checkpoint.
"""

# %% A server that is ready
import io

import numpy as np
from PIL import Image

from vllm_omni.client import SyncWorldClient
from vllm_omni.diffusion.utils.scenes import SCENES, first_picture

world = SyncWorldClient("http://127.0.0.1:8000", decode=True)
world.wait_ready()

# %% Walk ahead, turn right, and let night fall
chunks = []
with world:
    server = world.capabilities()
    picture = io.BytesIO()
    first_picture("day", height=server.height, width=server.width).save(picture, "PNG")
    world.start(picture.getvalue(), SCENES["day"].prompt, num_frames=45, seed=7)
    world.steer("w")  # keys w a s d i j k l, held until the next call
    for chunk in world:
        chunks.append(chunk)
        if chunk.index == 1:
            world.steer("wl")
            world.prompt(SCENES["night"].prompt, blend=2)

# %% When each event took effect: its chunk, counted from 0
print({event: chunk.index for chunk in chunks for event in chunk.started})

# %% The first frame of every chunk
Image.fromarray(np.hstack([chunk.frames[0] for chunk in chunks]))

# %% The video as a file
world.save("world.mp4")
