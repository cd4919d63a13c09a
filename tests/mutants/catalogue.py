"""The faults, each a small change of one or two places, and the check that has to see it."""

from dataclasses import dataclass

MODEL = "vllm_omni/diffusion/models/lingbot_world"
KV = "vllm_omni/experimental/ar_diffusion/kv_cache"
_MODEL_TESTS = "tests/diffusion/models/lingbot_world"

# Sets of the replay; "oracle" is the one that tests/helpers/oracle_set.py writes.
ORACLE = "replay oracle variants"
SCHEDULE = "replay data d_schedule"
CODEC = "replay data e_encode_decode"
DIRECT = "replay data a_transformer_direct"
ROLLOUTS = "replay data f_end_to_end"


@dataclass(frozen=True, slots=True)
class Change:
    """A text that stands exactly once in a file, and what stands there instead."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault.

    Attributes:
        check: ``replay WHERE SET`` or the name of a test.
    """

    name: str
    check: str
    changes: tuple[Change, ...]


def _mutant(name: str, check: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name, check, (Change(file, old, new),))


_WINDOW = (
    _mutant(
        "a frame goes into the slot beside its own",
        ORACLE,
        f"{KV}/window.py",
        "(latent_frame - self.sink_frames) % self.ring_frames",
        "(latent_frame - self.sink_frames + 1) % self.ring_frames",
    ),
    _mutant(
        "slots that were never filled are seen",
        ORACLE,
        f"{KV}/window.py",
        "return min(start + count, self.window_frames)",
        "return self.window_frames",
    ),
    _mutant(
        "the window is one frame short",
        ORACLE,
        f"{KV}/window.py",
        "return min(start + count, self.window_frames)",
        "return min(start + count, self.window_frames - 1)",
    ),
    _mutant(
        "the window is one frame short where pages are scattered",
        ORACLE,
        f"{KV}/session_kv.py",
        "table.to(self.pool.device), visible)",
        "table.to(self.pool.device), visible - self.tokens_per_frame)",
    ),
    _mutant(
        "tokens are one off inside scattered pages",
        ORACLE,
        f"{KV}/session_kv.py",
        "page_tokens + window_tokens % page_tokens",
        "page_tokens + (window_tokens + 1) % page_tokens",
    ),
    _mutant(
        "the sink rolls with the ring",
        ORACLE,
        f"{KV}/window.py",
        "        if latent_frame < self.sink_frames:\n            return latent_frame\n"
        "        return self.sink_frames + (latent_frame - self.sink_frames) % self.ring_frames",
        "        return latent_frame % self.window_frames",
    ),
    _mutant(
        "local_attn_size is ignored",
        f"{_MODEL_TESTS}/test_config.py::test_window",
        f"{MODEL}/config.py",
        "if self.local_attn_size == -1 else self.local_attn_size",
        "if self.local_attn_size else self.local_attn_size",
    ),
    _mutant(
        "a commit writes nothing",
        ORACLE,
        f"{MODEL}/chunk.py",
        "    transformer.write_window(",
        "    (lambda *_: None)(",
    ),
    _mutant(
        "the last layer of a commit does not turn its keys",
        ORACLE,
        f"{MODEL}/attention.py",
        "        key = self._rotated(self.norm_k(key), window)\n        sent",
        "        key = self.parts.heads(self.norm_k(key))\n        sent",
    ),
    _mutant(
        "a commit is made although the last step's keys are reused",
        f"{_MODEL_TESTS}/test_pipeline_lingbot_world.py"
        "::test_reusing_the_last_probe_changes_later_chunks_only",
        f"{MODEL}/pipeline.py",
        "if not self.config.reuse_last_step_kv:",
        "if self.config is not None:",
    ),
)
_POSITIONS_AND_TIME = (
    _mutant(
        "positions wrap at frame 1024",
        f"{_MODEL_TESTS}/test_far_positions.py",
        "vllm_omni/diffusion/layers/rope.py",
        "torch.arange(start_latent_frame, start_latent_frame + latent_frames),",
        "torch.arange(start_latent_frame, start_latent_frame + latent_frames) % 1024,",
    ),
    _mutant(
        "angles are computed in float32",
        SCHEDULE,
        "vllm_omni/diffusion/layers/rope.py",
        "angles = torch.outer(positions.double(), 1.0 / _BASE**exponents)",
        "angles = torch.outer(positions.float(), (1.0 / _BASE**exponents).float()).double()",
    ),
    _mutant(
        "columns are counted from the right",
        DIRECT,
        "vllm_omni/diffusion/layers/rope.py",
        "            torch.arange(columns),\n",
        "            torch.arange(columns).flip(0),\n",
    ),
    _mutant(
        "one timestep serves all frames",
        ORACLE,
        f"{MODEL}/transformer.py",
        "sinusoid = timestep_sinusoid(timesteps, self.config.freq_dim)",
        "sinusoid = timestep_sinusoid(timesteps[:1].expand_as(timesteps), self.config.freq_dim)",
    ),
    _mutant(
        "timesteps lose their fraction",
        ROLLOUTS,
        f"{MODEL}/pipeline.py",
        "self.model.transformer.embed_time(torch.tensor([step]))",
        "self.model.transformer.embed_time(torch.tensor([step]).trunc())",
    ),
    _mutant(
        "the flow shift of a request is ignored",
        ROLLOUTS,
        f"{MODEL}/pipeline.py",
        "self.model.flow_shift if request.flow_shift is None else request.flow_shift",
        "self.model.flow_shift",
    ),
)
_ROUNDING = (
    _mutant(
        "modulation is summed in bfloat16",
        f"{_MODEL_TESTS}/test_rounding.py",
        f"{MODEL}/blocks.py",
        "rows = (self.modulation + time.blocks.float()).unbind(dim=1)",
        "rows = (self.modulation + time.blocks).float().unbind(dim=1)",
    ),
    _mutant(
        "a gated sum is rounded twice",
        f"{_MODEL_TESTS}/test_rounding.py",
        f"{MODEL}/blocks.py",
        "(frames * gate.unsqueeze(1)).flatten(0, 1).add_(x).to(x.dtype)",
        "(frames * gate.unsqueeze(1)).flatten(0, 1).to(x.dtype).add_(x)",
    ),
    _mutant(
        "a norm is rounded before its weight",
        f"{_MODEL_TESTS}/test_rounding.py",
        "vllm_omni/diffusion/layers/norm.py",
        "torch.sqrt(square_sum / self.dim + self.eps) * self.weight.float()",
        "torch.sqrt(square_sum / self.dim + self.eps)).to(x.dtype) * (self.weight",
    ),
    _mutant(
        "GELU is exact",
        DIRECT,
        f"{MODEL}/blocks.py",
        'nn.GELU(approximate="tanh")',
        "nn.GELU()",
    ),
    _mutant(
        "bytes are cut off instead of rounded",
        CODEC,
        f"{MODEL}/pixel_output.py",
        "mul_(_LARGEST_BYTE).round_()",
        "mul_(_LARGEST_BYTE).floor_()",
    ),
)
_EXCHANGE = "vllm_omni/diffusion/distributed/comm.py"
_TO_HEADS = "send[:, :, :, index].copy_(split.permute(2, 0, 1, 3, 4))"
_TO_TOKENS = "return received.permute(1, 2, 0, 3, 4)"
_RANKS = (
    Mutant(
        "each rank has the other's heads, there and back",
        ORACLE,
        (
            Change(_EXCHANGE, _TO_HEADS, _TO_HEADS.replace("4))", "4).flip(0))")),
            Change(_EXCHANGE, _TO_TOKENS, _TO_TOKENS.replace("received.", "received.flip(0).")),
        ),
    ),
    _mutant(
        "heads come back in the order of the other rank",
        ORACLE,
        _EXCHANGE,
        _TO_TOKENS,
        _TO_TOKENS.replace("received.", "received.flip(0)."),
    ),
    _mutant(
        "every rank has the rotary rows of the first",
        ORACLE,
        f"{MODEL}/transformer.py",
        "self.exchange.plan.split(table.unflatten(0, frames)).flatten(0, 1)",
        "table.unflatten(0, frames)[:, : self.exchange.plan.local_count(frames[1])].flatten(0, 1)",
    ),
    _mutant(
        "keys and values are waited for before queries are made",
        "tests/diffusion/distributed/test_overlap.py",
        f"{MODEL}/attention.py",
        "        return sent, rest\n",
        "        sent.wait()\n        return sent, rest\n",
    ),
    _mutant(
        "keys and values are stored before they have come",
        "tests/diffusion/distributed/test_overlap.py",
        f"{MODEL}/attention.py",
        "    key, value = sent.wait()",
        "    key, value = sent.tensors",
    ),
    _mutant(
        "no columns come from the right",
        CODEC,
        f"{MODEL}/vae/columns.py",
        "0 if right is None else right",
        "0",
    ),
    _mutant(
        "no columns come from the left",
        CODEC,
        f"{MODEL}/vae/columns.py",
        "0 if left is None else left",
        "0",
    ),
    _mutant(
        "columns beyond the frame are seen",
        f"{_MODEL_TESTS}/vae/test_columns.py::test_every_rank_gathers_the_unsharded_video",
        f"{MODEL}/vae/columns.py",
        "        inside = self._columns_inside(frames.shape[2] - 2)",
        "        inside = frames.shape[2] - 2",
    ),
    _mutant(
        "an encoder that halves a frame sees columns beyond it",
        f"{_MODEL_TESTS}/vae/test_columns.py"
        "::test_the_next_column_is_the_neighbours_and_columns_beyond_the_frame_are_zeros",
        f"{MODEL}/vae/columns.py",
        "        inside = self._columns_inside(width)",
        "        inside = width",
    ),
    _mutant(
        "a rank beyond the frame sees its own columns",
        f"{_MODEL_TESTS}/vae/test_columns.py::test_a_rank_wholly_beyond_the_frame_sees_zeros",
        f"{MODEL}/vae/columns.py",
        "max(0, frame_width - self.group.rank * slab_width)",
        "frame_width - self.group.rank * slab_width",
    ),
    _mutant(
        "the root forgets its own columns",
        f"{_MODEL_TESTS}/test_lingbot_pixel_gather.py"
        "::test_every_mode_gives_the_bytes_of_the_definition",
        f"{MODEL}/pixel_output.py",
        "        arena[ROOT] = mine\n",
        "        arena[ROOT] = 0\n",
    ),
)
_SESSIONS = (
    _mutant(
        "the camera of keys stands still",
        ROLLOUTS,
        f"{MODEL}/camera.py",
        "return camera, poses[-1], pitch_rad",
        "return camera, state.pose, pitch_rad",
    ),
    _mutant(
        "the transformer does not see the camera",
        DIRECT,
        f"{MODEL}/transformer.py",
        "camera=self.embed_camera(camera),",
        "camera=self.embed_camera(torch.zeros_like(camera)),",
    ),
    _mutant(
        "sessions share a generator",
        f"{_MODEL_TESTS}/test_pipeline_lingbot_world.py"
        "::test_interleaved_sessions_equal_each_alone",
        f"{MODEL}/pipeline.py",
        "return torch.Generator(place).manual_seed(request.seed)",
        "return torch.manual_seed(request.seed)",
    ),
    _mutant(
        "the seed is ignored",
        ROLLOUTS,
        f"{MODEL}/pipeline.py",
        ".manual_seed(request.seed)",
        ".manual_seed(42)",
    ),
    _mutant(
        "the decoder forgets the chunk before",
        ROLLOUTS,
        f"{MODEL}/pipeline.py",
        "            decoder=decoder,\n",
        "            decoder=self.model.output.fresh(kind),\n",
    ),
)
_FAKE_CUDA = f"{_MODEL_TESTS}/test_fake_cuda.py"
_DEVICE = (
    _mutant(
        "the host waits for the device at each upload",
        _FAKE_CUDA,
        "vllm_omni/platforms/base.py",
        "return host.contiguous().pin_memory().to(device, non_blocking=True)",
        "return host.to(device)",
    ),
    _mutant(
        "a rotary table stays on the host",
        _FAKE_CUDA,
        "vllm_omni/diffusion/layers/rope.py",
        "cos=to_device(angles.cos().float().to(dtype), device)",
        "cos=angles.cos().float().to(dtype)",
    ),
)
MUTANTS = (*_WINDOW, *_POSITIONS_AND_TIME, *_ROUNDING, *_RANKS, *_SESSIONS, *_DEVICE)
