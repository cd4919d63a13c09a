"""Compares a small world on a device with the same world on the CPU."""

from functools import cache

import torch
from torch import Tensor, nn

from benchmarks.lingbot_world.bench_real import Scale, World, scale_of, transformer_of
from benchmarks.lingbot_world.roofline_counts import TEXT_TOKENS
from vllm_omni.diffusion.attention.backend import create_attention_backend
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.diffusion.models.lingbot_world.blocks import EAGER, PostAttention
from vllm_omni.diffusion.models.lingbot_world.config import CAMERA_CHANNELS
from vllm_omni.diffusion.models.lingbot_world.lease_capture import LeaseSize
from vllm_omni.diffusion.models.lingbot_world.leased_post_attention import LeasedPostAttention
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE, fuse_norms
from vllm_omni.diffusion.models.loader import materialize
from vllm_omni.platforms import create_platform

_CHUNKS = 5
_STD = 0.05
_CPU = torch.device("cpu")


def fill(module: nn.Module, device: torch.device, std: float) -> None:
    """Give a module weights that are the same on every device."""
    materialize(module, device)
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        drawn = torch.randn(parameter.shape, generator=generator) * std
        parameter.data.copy_(drawn.to(parameter.dtype))


class SmallWorld:
    """A transformer, its window and a decoder, with weights and noise of the host."""

    def __init__(
        self, scale: Scale, device: torch.device, dtype: torch.dtype, backend: str, *, leased: bool
    ) -> None:
        self.scale, self.device, self.dtype = scale, device, dtype
        tokens = LATENT_FRAMES_PER_CHUNK * scale.geometry.tokens_per_frame
        post: PostAttention = EAGER
        if leased:
            runtime = create_platform(device.type).graph_runtime()
            post = LeasedPostAttention(runtime, LeaseSize(tokens, scale.transformer.dim, device))
        attention = create_attention_backend(backend)
        self.transformer = transformer_of(scale.transformer, dtype, device, attention, post)
        with torch.device("meta"):
            self.vae = WanVAE(scale.vae).to(dtype)
        fill(self.transformer, device, _STD)
        fill(self.vae, device, _STD)
        self.vae.prepare()
        post.prepare(self.transformer.layers)
        self.world = World(self.transformer, scale.geometry, device)
        post.begin_session(tokens)

    def roll(self) -> tuple[Tensor, Tensor]:
        """Return latents and pixels of all chunks, in float32 on the host."""
        generator = torch.Generator().manual_seed(3)
        world, size = self.world, self.world.size

        def draw(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator)
            return drawn.to(self.device, self.dtype)

        text = self.transformer.embed_text(draw(TEXT_TOKENS, self.scale.transformer.text_dim))
        condition, state = draw(20, *size), DecoderState()
        latents, pixels = [], []
        for chunk in range(_CHUNKS):
            start = LATENT_FRAMES_PER_CHUNK * chunk
            context = world.context(draw(CAMERA_CHANNELS, *size), text, start)
            clean = world.denoise(condition, context, generator)
            decoded, state = self.vae.decode(clean, state)
            world.commit(clean, condition, context)
            latents.append(clean.float().cpu())
            pixels.append(decoded.float().cpu())
        return torch.cat(latents, 1), torch.cat(pixels, 1)


class SameResults:
    """The device against the CPU, which is computed once for each dtype."""

    def __init__(self, device: torch.device, backend: str, compiler: str) -> None:
        self._device, self._backend, self._compiler = device, backend, compiler
        self._on_cpu = cache(self._roll_on_cpu)

    def compare(
        self, dtype: torch.dtype, *, compiled: bool = False, leased: bool = False
    ) -> dict[str, object]:
        """Tell how far latents and pixels are from those of the CPU in the same dtype."""
        world = SmallWorld(scale_of("tiny"), self._device, dtype, self._backend, leased=leased)
        if compiled:
            assert fuse_norms(world.vae), "the fused norm is wrong on this GPU"
            for block in world.transformer.blocks:
                block.compile(dynamic=False, backend=self._compiler)
        made, wanted = world.roll(), self._on_cpu(dtype)
        facts: dict[str, object] = {"dtype": str(dtype), "compiled": compiled, "leased": leased}
        for name, ours, theirs in zip(("latents", "pixels"), made, wanted, strict=True):
            apart = (ours - theirs).double()
            facts[name] = {
                "largest": float(apart.abs().max()),
                "relative": float(apart.norm() / theirs.double().norm()),
                "finite": bool(ours.isfinite().all()),
            }
        return facts

    def _roll_on_cpu(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return SmallWorld(scale_of("tiny"), _CPU, dtype, "sdpa", leased=False).roll()
