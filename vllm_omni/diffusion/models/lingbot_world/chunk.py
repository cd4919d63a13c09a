"""The sampler of one chunk: its four denoising steps, and the forward that commits the result."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.diffusion.models.lingbot_world.blocks import TimeEmbedding
from vllm_omni.diffusion.models.lingbot_world.transformer import (
    CausalLingBotWorldTransformer3DModel,
    ChunkContext,
)
from vllm_omni.platforms.base import to_device

DMD_LABELS = (1000, 750, 500, 250)
COMMIT_TIMESTEP = 0.0
_TRAIN_STEPS = 1000


@dataclass(frozen=True, slots=True)
class DmdSchedule:
    """The four distilled steps, warped by ``sigma = s b / ((1 - b) + s b)``, ``b = label / 1000``.

    Attributes:
        timesteps: ``sigma * 1000`` of each step, which the network is given.
        sigmas: share of noise in the input of each step, in double precision.
    """

    timesteps: tuple[float, ...]
    sigmas: tuple[float, ...]

    @classmethod
    def with_shift(cls, flow_shift: float) -> "DmdSchedule":
        """Make the schedule of a flow shift ``s``."""
        sigmas = []
        for label in DMD_LABELS:
            base = label / _TRAIN_STEPS
            numerator = flow_shift * base
            sigmas.append(numerator / ((1.0 - base) + numerator))
        return cls(tuple(sigma * _TRAIN_STEPS for sigma in sigmas), tuple(sigmas))


def draw_noise(
    generator: torch.Generator, *, channels: int, height: int, width: int, device: torch.device
) -> Float32[Tensor, "channels 3 height width"]:
    """Draw the noise of a chunk on the generator's device and move it to ``device``."""
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
    """Turn noise into clean latents in four forwards and exactly four draws from ``generator``.

    Each step computes ``x0 = x - sigma v`` and ``x' = (1 - sigma') x0 + sigma' noise``. Sigmas are
    double precision and are rounded to float32 at the product; latents are float32 throughout.
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
