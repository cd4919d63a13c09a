"""The sampler of one chunk: four probes that commit nothing, then the commit forward."""

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.diffusion.models.lingbot_world.blocks import TimeEmbedding
from vllm_omni.diffusion.models.lingbot_world.schedule import DmdSchedule
from vllm_omni.diffusion.models.lingbot_world.transformer import (
    CausalLingBotWorldTransformer3DModel,
    ChunkContext,
)
from vllm_omni.platforms.transfer import to_device


def draw_noise(
    generator: torch.Generator, *, channels: int, height: int, width: int, device: torch.device
) -> Float32[Tensor, "channels 3 height width"]:
    """One draw of a chunk's size where the generator lives, moved to ``device``."""
    shape = (1, channels, LATENT_FRAMES_PER_CHUNK, height, width)
    noise = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    return to_device(noise[0], device)


def denoise(
    transformer: CausalLingBotWorldTransformer3DModel,
    *,
    condition: Float[Tensor, "20 3 height width"],
    context: ChunkContext,
    schedule: DmdSchedule,
    steps: tuple[TimeEmbedding, ...],
    generator: torch.Generator,
) -> Float32[Tensor, "16 3 height width"]:
    """Noise to clean latents in four probes; exactly four draws from ``generator``.

    ``x0 = x - sigma v`` and ``x' = (1 - sigma') x0 + sigma' noise``; levels are double
    precision and are rounded to float32 at the product, latents are float32 throughout.
    """
    _, _, height, width = condition.shape
    shape = {"channels": transformer.config.out_channels, "height": height, "width": width}
    # All at once: noise of the host that came between the probes would make the device wait.
    noise = [draw_noise(generator, device=condition.device, **shape) for _ in schedule.sigmas]
    x = noise[0]
    for index, sigma in enumerate(schedule.sigmas):
        flow = transformer(torch.cat((x.to(condition.dtype), condition)), steps[index], context)
        x = x - sigma * flow.float()
        if index + 1 < len(schedule.sigmas):
            following = schedule.sigmas[index + 1]
            x = (1.0 - following) * x + following * noise[index + 1]
    return x


def commit(
    transformer: CausalLingBotWorldTransformer3DModel,
    *,
    clean: Float32[Tensor, "16 3 height width"],
    condition: Float[Tensor, "20 3 height width"],
    context: ChunkContext,
    step: TimeEmbedding,
) -> None:
    """Write the keys and values of the clean latents into the window."""
    transformer.write_window(torch.cat((clean.to(condition.dtype), condition)), step, context)
