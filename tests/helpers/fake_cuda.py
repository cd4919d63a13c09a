"""A rollout of the worker on device ``cuda`` without one: tensors have shapes and no values.

What a GPU would refuse is refused here: operands on two devices, and whatever makes the host wait
for the device (pageable copies, values read back). Run as a program, it prints what each chunk
copied, as JSON. Loading, the prompt's encoder and the attention kernel stand in; the worker, its
plan of memory, the pipeline and the platform are the product's.
"""

import json
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from benchmarks.lingbot_world.fused_kernels import PlannedAttention, allow_fake_cuda
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.comm import UlyssesExchange
from vllm_omni.diffusion.distributed.parallel_state import SINGLE
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.layers.linear import GeluLinearMethod, PlainLinearMethod
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    OutputKind,
    PromptStep,
    ScriptedKeys,
    SessionRequest,
    SourceImage,
    TokenizedPrompt,
)
from vllm_omni.diffusion.models.interface import memory_needs
from vllm_omni.diffusion.models.lingbot_world import camera, load
from vllm_omni.diffusion.models.lingbot_world.attention import LayerParts
from vllm_omni.diffusion.models.lingbot_world.camera import path_motion
from vllm_omni.diffusion.models.lingbot_world.pipeline import (
    LingBotWorldCausalDMDPipeline,
    LoadedModel,
)
from vllm_omni.diffusion.models.lingbot_world.pixel_output import ChunkOutput
from vllm_omni.diffusion.models.lingbot_world.transformer import (
    CausalLingBotWorldTransformer3DModel,
)
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE
from vllm_omni.diffusion.worker import worker
from vllm_omni.platforms.cuda import CudaPlatform

CUDA = torch.device("cuda", 0)
CHUNKS, SWITCH, FIXED = 5, 3, 3
"""Chunks of the rollout; the one that changes the prompt; the first with a fixed condition."""
_ATEN = torch.ops.aten
_READS = {_ATEN.equal.default, _ATEN._local_scalar_dense.default, _ATEN.nonzero.default}
_COPIES = {_ATEN._to_copy.default, _ATEN.copy_.default}


class HostWaitsError(AssertionError):
    """The host would wait for the device where nobody means it to."""


class Transfers(TorchDispatchMode):
    """Counts copies between host and device, and refuses those that make the host wait.

    Attributes:
        counts: ``uploads``, ``downloads`` and ``comparisons`` since they were last cleared.
        same: what a comparison of two tensors says; no tensor has values.
    """

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.same = False
        self._pinned = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        named = dict(kwargs or {})
        if func.namespace == "aten" and func._can_decompose():
            with self:
                made = func.decompose(*args, **named)
            if made is not NotImplemented:
                return made
        if func is _ATEN._pin_memory.default:
            return self._pin(args[0].clone())
        if named.pop("pin_memory", False):
            return self._pin(func(*args, **named))
        on_gpu = any(t.device.type == "cuda" for t in tree_leaves(args) if torch.is_tensor(t))
        if func is _ATEN.equal.default and on_gpu:
            self.counts["comparisons"] += 1
            return self.same
        if func in _READS and on_gpu:
            raise HostWaitsError(f"{func} reads a value of the device")
        made = func(*args, **named)
        if func in _COPIES:
            source, target = (args[1], args[0]) if func is _ATEN.copy_.default else (args[0], made)
            queued = named.get("non_blocking", False) or any(args[2:])
            self._check_copy(source, target, queued=queued)
        return made

    def _pin(self, tensor):
        self._pinned.append(tensor)
        return tensor

    def _check_copy(self, source, target, *, queued):
        kinds = source.device.type, target.device.type
        if kinds[0] == kinds[1] or source.dim() == 0:
            return
        host = source if kinds[0] == "cpu" else target
        if not queued or _storage(host) not in map(_storage, self._pinned):
            raise HostWaitsError(f"a copy of {tuple(source.shape)} from {kinds[0]} is not queued")
        self.counts["uploads" if host is source else "downloads"] += 1


def _storage(tensor):
    return tensor.untyped_storage()._cdata


class FakeCudaPlatform(CudaPlatform):
    """The platform itself; only the values that leave it are made up."""

    def to_host(self, tensor):
        host = super().to_host(tensor)
        with _disable_current_modes():
            return torch.zeros(host.shape, dtype=host.dtype)


class FakeEvent:
    """An event of an idle device."""

    def __init__(self, *, enable_timing=False):
        del enable_timing

    def record(self, stream):
        del stream

    def synchronize(self):
        pass

    def elapsed_time(self, _):
        return 0.0


class ReadyPrompts:
    """Prompts that have been embedded; the encoder's own copies are made once for each prompt."""

    num_bytes = 0

    def __init__(self, text_dim):
        self._text_dim = text_dim

    def prepare(self, prompt):
        del prompt

    def is_on(self, device):
        return device == CUDA

    def embed(self, prompt):
        del prompt
        return torch.zeros(512, self._text_dim, device=CUDA, dtype=torch.bfloat16)


def on_host(*motion):
    """Compute the camera's motion with values: it is a matter of the host."""
    with _disable_current_modes():
        return path_motion(*motion)


def build_pipeline(config, *, platform, device, parallel):
    """What the loader builds, with weights that have no values."""
    facts = load.read_checkpoint(Path(config.model), config.kv_cache)
    parts = LayerParts(
        config=facts.transformer, dtype=torch.bfloat16, linear=PlainLinearMethod(),
        product_with_gelu=GeluLinearMethod(),
        backend=PlannedAttention(), tensor_parallel=SINGLE, exchange=UlyssesExchange(SINGLE),
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with device:
        transformer, vae = CausalLingBotWorldTransformer3DModel(parts), WanVAE(facts.vae)
    torch.set_default_dtype(torch.float32)
    for module in (transformer, vae):
        module.requires_grad_(False).eval()
    vae.prepare()
    gather = load.pixel_gather(config, platform, parallel, device)
    model = LoadedModel(
        text=ReadyPrompts(facts.transformer.text_dim), transformer=transformer, vae=vae,
        output=ChunkOutput(vae, parallel, gather), flow_shift=facts.flow_shift, device=device,
    )  # fmt: skip
    pipeline = LingBotWorldCausalDMDPipeline(config, model, platform)
    with _disable_current_modes():  # sizes are kept; they are found on ``meta``
        memory_needs(pipeline, config.prepared_geometry)
    return pipeline


def rollout(checkpoint):
    """Counts of opening and of each chunk."""
    config = OmniDiffusionConfig(
        model=checkpoint, device="cuda", dtype="bfloat16", enforce_eager=True,
        geometry=VideoGeometry(64, 96),
    )  # fmt: skip
    request = SessionRequest(
        prompt=TokenizedPrompt("a road"), height=64,
        image=SourceImage(rgb=np.full((64, 96, 3), 90, np.uint8)),
        width=96, num_chunks=CHUNKS, seed=3, output=OutputKind.UINT8, generator_device="cpu",
        camera=ScriptedKeys(((frozenset("w"), frozenset("l"), frozenset()),) * CHUNKS),
    )  # fmt: skip
    counted, results = [], []
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = worker.Worker(config)
        with Transfers() as transfers:
            made.open_session("s", request)
            counted.append(dict(transfers.counts))
            for index in range(CHUNKS):
                transfers.counts.clear()
                transfers.same = index >= FIXED
                prompt = PromptStep(TokenizedPrompt("a river"), 0.5) if index == SWITCH else None
                made.run_chunk(ChunkPlan("s", index, prompt=prompt), results.append)
                counted.append(dict(transfers.counts))
    return counted


def main():
    allow_fake_cuda()
    gpu = {
        "device_count": lambda: 1, "set_device": lambda _: None, "empty_cache": lambda: None,
        "mem_get_info": lambda _: (2**36, 2**37), "Event": FakeEvent,
        "current_stream": lambda _: None, "synchronize": lambda _: None,
    }  # fmt: skip
    found = SimpleNamespace(load_loader=lambda: build_pipeline)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **gpu))
        stack.enter_context(mock.patch.object(worker, "model_of", return_value=found))
        platform = mock.patch.object(worker, "create_platform", return_value=FakeCudaPlatform())
        stack.enter_context(platform)
        stack.enter_context(mock.patch.object(camera, "path_motion", on_host))
        print(json.dumps(rollout(sys.argv[1])))


if __name__ == "__main__":
    main()
