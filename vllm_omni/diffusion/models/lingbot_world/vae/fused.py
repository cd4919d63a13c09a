"""Puts the fused norm into a VAE on a GPU, where it was seen to be right."""

from importlib import import_module

import torch
from torch.nn import functional as F

from vllm_omni.diffusion.models.lingbot_world.vae.layers import NormSilu
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE

_FRAMES, _ROWS, _COLUMNS = 2, 3, 5
_KERNEL_FILE = "vllm_omni.diffusion.models.lingbot_world.vae.norm_silu"


def fuse_norms(vae: WanVAE) -> bool:
    """Let each norm before a SiLU be one kernel with it. Only a GPU has such a kernel.

    Needs Triton. The kernel is compiled here for all sizes of frames, never within a chunk.

    Returns:
        False if the kernel is wrong on this GPU. Nothing is changed then.
    """
    if vae.device.type != "cuda":
        return True
    kernel = import_module(_KERNEL_FILE).norm_silu
    right = all(is_right(kernel, n, vae.dtype, vae.device) for n in vae.norm_widths())
    if right:
        vae.fuse_norms(kernel)
    return right


def is_right(kernel: NormSilu, channels: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether a kernel computes a small random case as separate calls do.

    A sum in another order may round the norm one step of ``eps |v|`` further. The slope of SiLU is
    at most 1.1, and rounding its own result adds half a step on both sides.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (_FRAMES, _ROWS, _COLUMNS, channels)
    x = torch.randn(shape, generator=generator).to(dtype)
    scale = torch.randn(channels, generator=generator)
    normed = F.normalize(x.float(), dim=-1) * scale
    wanted = F.silu(normed.to(dtype).float())
    # Borders show whether the kernel writes its own columns alone.
    frames = torch.zeros(_FRAMES, _ROWS, _COLUMNS + 2, channels, dtype=dtype, device=device)
    kernel(x.to(device), scale.to(device), frames[:, :, 1:-1])
    error = (frames.cpu().float() - F.pad(wanted, (0, 0, 1, 1))).abs()
    allowed = 2.2 * torch.finfo(dtype).eps * float(normed.abs().max())
    return float(error.max()) <= allowed and not frames[:, :, [0, -1]].any()
