"""The Wan VAE with explicit streaming state."""

from vllm_omni.diffusion.models.lingbot_world.vae.config import VaeConfig
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState, EncoderState
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE

__all__ = ["DecoderState", "EncoderState", "VaeConfig", "WanVAE"]
