"""The model at its real shapes with random weights: rates, times, memory."""

import tempfile
import time
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.lingbot_world.bench_real import RealBench, Scale
from benchmarks.lingbot_world.bench_timing import Clock, peak_bytes
from benchmarks.lingbot_world.roofline_counts import layer_flops
from vllm_omni.diffusion.attention.reference import ReferenceAttention
from vllm_omni.diffusion.models.lingbot_world.vae.memory import decoder_bytes, encoder_bytes
from vllm_omni.diffusion.models.lingbot_world.vae.state import EncoderState
from vllm_omni.diffusion.models.loader import module_bytes
from vllm_omni.platforms import create_platform

_GIB = 2**30
_GB = 1e9
_TERA = 1e12
_CHECKED_QUERIES = 64
_HEADS = (40, 20, 10, 5)
_KERNELS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
_LOADED_BYTES = {"full": 2 * 2**30, "tiny": 2**22}


class ModelChecks:
    """The measurements; the model is built when the first one needs it."""

    def __init__(self, scale: Scale, device: torch.device, backend: str, compiler: str) -> None:
        self.scale, self.device = scale, device
        self._backend, self._compiler = backend, compiler
        self._clock = Clock(device)

    @cached_property
    def bench(self) -> RealBench:
        """The transformer with its window, on the device."""
        return RealBench(self.scale, self.device, self._backend, None)

    def attention_kernels(self) -> list[dict[str, object]]:
        """Rate and error of each fused kernel, for the heads of one, two, four and eight ranks."""
        own = self.scale.transformer.num_attention_heads
        return [
            self._attention(heads, kernel)
            for heads in _HEADS
            if heads <= own or heads == _HEADS[-1]
            for kernel in _KERNELS
        ]

    def compiled_layer(self) -> dict[str, object]:
        """Time of one layer after compiling, and how long that took."""
        began_s = time.monotonic()
        for block in self.bench.transformer.blocks:
            block.compile(dynamic=False, backend=self._compiler)
        self.bench.layer()
        compiled_s = time.monotonic() - began_s
        return {"first_s": compiled_s, **self.bench.layer()}

    def decode(self) -> dict[str, object]:
        """Decode of a later chunk, its conversion to bytes, and their copy to the host."""
        facts: dict[str, object] = dict(self.bench.decode())
        geometry = self.scale.geometry
        frames = torch.zeros(
            12, geometry.height, geometry.width, 3, dtype=torch.uint8, device=self.device
        )
        platform = create_platform(self.device.type)
        began_s = time.monotonic()
        for _ in range(self.scale.repeats):
            platform.to_host(frames)
        facts["to_host_ms"] = 1e3 * (time.monotonic() - began_s) / self.scale.repeats
        return facts

    def encode(self) -> dict[str, object]:
        """Encode of a later chunk's condition: a picture, then grey."""
        vae, geometry = self.bench.build_vae(), self.scale.geometry
        shape = (geometry.height, geometry.width)
        pixels = torch.zeros(3, 9, *shape, device=self.device, dtype=torch.bfloat16)
        later = torch.zeros(3, 12, *shape, device=self.device, dtype=torch.bfloat16)
        _, state = vae.encode(pixels, EncoderState())
        repeats = max(3, self.scale.repeats // 4)
        return {"ms": self._clock.median(lambda: vae.encode(later, state), repeats)}

    def loading(self) -> dict[str, object]:
        """Rate from a file in the page cache to the device, as the loader reads weights."""
        wanted = _LOADED_BYTES["full" if self.scale.repeats > _FEW_REPEATS else "tiny"]
        side = int((wanted / 2 / 8) ** 0.5)
        tensors = {f"w{n}": torch.zeros(side, side, dtype=torch.bfloat16) for n in range(8)}
        held = sum(tensor.nbytes for tensor in tensors.values())
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            path = Path(folder) / "weights.safetensors"
            save_file(tensors, path)
            targets = {name: torch.empty_like(t, device=self.device) for name, t in tensors.items()}
            began_s = time.monotonic()
            with safe_open(path, framework="pt") as shard:
                for name, target in targets.items():
                    target.copy_(shard.get_slice(name)[:])
            create_platform(self.device.type).synchronize(self.device)
            return {"gb_per_s": held / _GB / (time.monotonic() - began_s), "gb": held / _GB}

    def memory(self) -> dict[str, object]:
        """Peak of this process, and what is planned for weights, window and activations."""
        vae, geometry = self.bench.build_vae(), self.scale.geometry
        coders = [
            count(vae.config, vae.dtype, geometry.height, geometry.width)
            for count in (encoder_bytes, decoder_bytes)
        ]
        planned = {
            "transformer": module_bytes(self.bench.transformer),
            "vae": module_bytes(vae),
            "window": self.bench.world.pool.num_bytes,
            "vae_histories": sum(coder.state for coder in coders),
            "activations": max(coder.activations for coder in coders),
        }
        return {
            "peak_gib": peak_bytes(self.device) / _GIB,
            "planned_gib": {name: size / _GIB for name, size in planned.items()},
        }

    def _attention(self, heads: int, kernel: str) -> dict[str, object]:
        counts = self.bench.counts
        shape = (heads, counts.head_dim)
        query = self._draw(counts.chunk_tokens, *shape)
        key, value = (self._draw(counts.window_tokens, *shape) for _ in range(2))
        scale = counts.head_dim**-0.5
        operands = [part.transpose(0, 1).unsqueeze(0) for part in (query, key, value)]

        def attend() -> torch.Tensor:
            with sdpa_kernel([SDPBackend.__members__[kernel]]):
                return scaled_dot_product_attention(*operands, scale=scale)

        facts: dict[str, object] = {"heads": heads, "kernel": kernel}
        try:
            made = attend()[0].transpose(0, 1)[-_CHECKED_QUERIES:].float()
            ms = self._clock.median(attend, self.scale.repeats)
        except RuntimeError as error:
            return facts | {"error": str(error).partition("\n")[0]}
        wanted = ReferenceAttention().attend(
            query[-_CHECKED_QUERIES:].float(), key.float(), value.float(), scale=scale
        )
        flops = layer_flops(counts, counts.window_tokens).self_attention * heads / counts.heads
        return facts | {
            "ms": ms,
            "tflops": flops / _TERA / ms * 1e3,
            "largest_error": float((made - wanted).abs().max()),
        }

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)


_FEW_REPEATS = 3
"""Repeats of the tiny scale."""
