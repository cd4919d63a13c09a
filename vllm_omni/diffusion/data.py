"""The resolved configuration of an engine: frozen, complete, without torch.

Each field that a user can set is declared here or, where resolution itself acts on it, in
:mod:`vllm_omni.config.stage`; see :mod:`vllm_omni.setting`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.errors import ConfigError, ConfigTypeError, UnsupportedParallelismError
from vllm_omni.inputs.checking import FlowShift, Fps, Frames, OutputType, Seed, Side
from vllm_omni.other_keys import PARALLEL_KEYS
from vllm_omni.setting import (
    PARALLEL,
    NotNegative,
    Positive,
    Seconds,
    Text,
    check_fields,
    names,
    setting,
    settings_of,
)
from vllm_omni.wording import problems, refuse, shown

DEFAULT_GEOMETRY = VideoGeometry(480, 832)
"""Size that a deployment is prepared for when it configures none."""

Device = Annotated[str, names(("cpu", "cuda", "npu"))]
ATTENTION_BACKENDS: Mapping[str, str] = {
    "sdpa": "vllm_omni.diffusion.attention.sdpa:SdpaAttention",
    "flash": "vllm_omni.diffusion.attention.sdpa:FlashAttention",
    "flash3": "vllm_omni.diffusion.attention.sdpa:Flash3Attention",
    "npu_fusion": "vllm_omni.diffusion.attention.npu_fusion:NpuFusionAttention",
    "reference": "vllm_omni.diffusion.attention.reference:ReferenceAttention",
}
"""Name of each backend -> where its class is; imported where it is used, since it loads torch."""
PIXEL_OUTPUT_MODES = ("auto", "native", "root_float", "root_uint8_allgather", "root_uint8_p2p")
_ATTENTION_NAMES = names(("auto", *ATTENTION_BACKENDS), {
    "torch_sdpa": "sdpa", "flash_attn": "flash", "flash_attention": "flash",
    "flash_attn_3": "flash3",
    "ascend": "npu_fusion", "ascend_attn": "npu_fusion",
})  # fmt: skip

_MODEL = "model_config."
_KV = "model_config.ar_diffusion_kv_config."
_SAMPLING = "default_sampling_params."


def _written(value: object) -> object:
    return str(value) if type(value) is int else value


def _usable_extra_args(value: dict[str, object]) -> dict[str, object]:
    try:
        _FLOW_SHIFT.validate_python(value.get("flow_shift"))
    except ValidationError as error:
        raise ValueError(f"flow_shift {problems(error)[0].text}") from None
    return value


_FLOW_SHIFT: TypeAdapter[float | None] = TypeAdapter(FlowShift | None)


def _holdable(variables: dict[str, str]) -> dict[str, str]:
    """Refuse names and values that no environment can hold."""
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"no variable of an environment is called {shown(name)}")
        if "\0" in value or _SURROGATE.search(f"{name}{value}"):
            raise ValueError(f"no environment holds the value or the name of {shown(name)}")
    return variables


_SURROGATE = re.compile("[\ud800-\udfff]")
_Environment = Annotated[
    dict[str, Annotated[str, BeforeValidator(_written)]], AfterValidator(_holdable)
]


@dataclass(frozen=True, slots=True, init=False)
class DiffusionParallelConfig:
    """How the ranks of one worker group share one world.

    Attributes:
        sequence_parallel_size: the same as ``ulysses_degree`` where it is given.
    """

    # fmt: off
    tensor_parallel_size: Annotated[Positive, setting(
        "ranks that share each linear", "--tensor-parallel-size -tp", key=PARALLEL)] = 1
    ulysses_degree: Annotated[Positive, setting(
        "ranks that share the tokens of each latent frame", "--usp --ulysses-degree",
        key=PARALLEL)] = 1
    sequence_parallel_size: Annotated[Positive | None, setting(
        "must equal ulysses_degree where it is given", key=PARALLEL)] = None
    # fmt: on

    def __init__(self, **degrees: object) -> None:
        """Take any key of ``parallel_config``, also those that this model has only one value for.

        Raises:
            ConfigTypeError: if there is no such key.
            ConfigError: if a value is of the wrong kind or below 1.
            UnsupportedParallelismError: if this model does not run with a value.
        """
        own = {one.name: one for _, one in settings_of(DiffusionParallelConfig)}
        known = own | {one.name: one for one in PARALLEL_KEYS}
        for name, value in degrees.items():
            if name not in known:
                raise ConfigTypeError(f"{PARALLEL}{name} is unknown; known are {', '.join(known)}")
            if value is not None:
                known[name].checked(value, known[name].key)
                known[name].refuse(value, known[name].key)
        for name, one in own.items():
            given = degrees.get(name)
            object.__setattr__(self, name, one.default if given is None else given)
        if self.sequence_parallel_size not in {None, self.ulysses_degree}:
            raise UnsupportedParallelismError(
                f"parallel_config.sequence_parallel_size is {self.sequence_parallel_size} but "
                f"ulysses_degree is {self.ulysses_degree}; set both to the same number or leave "
                "sequence_parallel_size out"
            )

    @property
    def world_size(self) -> int:
        """Number of worker processes, one for each rank."""
        return self.tensor_parallel_size * self.ulysses_degree

    def check_heads(self, num_heads: int) -> None:
        """Refuse degrees that do not divide the attention heads, before weights are read."""
        if num_heads % self.world_size:
            raise UnsupportedParallelismError(
                f"{num_heads} attention heads cannot be split over tensor_parallel_size "
                f"{self.tensor_parallel_size} x ulysses_degree {self.ulysses_degree} = "
                f"{self.world_size} ranks; choose degrees whose product divides {num_heads}"
            )

    def check_feed_forward(self, ffn_dim: int) -> None:
        """Refuse a tensor-parallel size that does not divide the feed-forward features."""
        if ffn_dim % self.tensor_parallel_size:
            raise UnsupportedParallelismError(
                f"{ffn_dim} feed-forward features cannot be split over tensor_parallel_size "
                f"{self.tensor_parallel_size}; choose a size that divides {ffn_dim}"
            )

    def check_geometry(self, geometry: VideoGeometry) -> None:
        """Refuse a size whose frames cannot be shared evenly by the Ulysses ranks."""
        if geometry.tokens_per_frame % self.ulysses_degree:
            raise UnsupportedParallelismError(
                f"size {geometry} has {geometry.tokens_per_frame} tokens per latent frame, which "
                f"ulysses_degree {self.ulysses_degree} does not divide; take another size or degree"
            )


def _holds_a_chunk(value: int) -> int | None:
    if value in {1, 2}:
        raise refuse("must be 0 or at least 3, to hold a chunk of 3 latent frames")
    return value or None


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """Memory and shape of the paged KV window."""

    # fmt: off
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1), setting(
        "share of the memory free after loading, for all sessions; on CPU max_num_seqs decides",
        key=_KV)] = 0.1
    window_chunks: Annotated[Annotated[NotNegative, AfterValidator(_holds_a_chunk)] | None, setting(
        "latent frames of the rolling part (not chunks, despite the name); 0: the checkpoint's",
        key=_KV, unsaid="the checkpoint's")] = None
    sink_chunks: Annotated[NotNegative, setting(
        "latent frames kept for ever; 0: the checkpoint's", key=_KV, unsaid="the checkpoint's")] = 0
    page_tokens: Annotated[Positive, setting("tokens per page of the pool", key=_KV)] = 128
    # fmt: on

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """How many worker groups serve behind one line.

    Attributes:
        devices: those of each replica, comma-separated; empty where all use the stage's own.
    """

    # fmt: off
    num_replicas: Annotated[Positive, setting(
        "worker groups that serve from the start on, each with devices of its own",
        "--omni-dp-size-local", aliases="omni_dp_size_local")] = 1
    max_replicas: Annotated[Positive | None, setting(
        "worker groups at most: beyond num_replicas, which are always there, another one starts "
        "while sessions wait or fewer places than elastic.spare are free", "--max-replicas",
        unsaid="num_replicas")] = None
    spare: Annotated[NotNegative, setting(
        "free places that are kept for those who will come", "--elastic-spare",
        key="elastic.")] = 0
    idle_s: Annotated[Seconds, setting(
        "seconds without sessions after which a worker group beyond num_replicas ends",
        "--elastic-idle-s", key="elastic.")] = 600.0
    # fmt: on
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.most < self.num_replicas:
            raise ConfigError(
                f"max_replicas is {self.max_replicas}, but num_replicas is {self.num_replicas}; "
                "raise max_replicas or leave it out"
            )

    @property
    def most(self) -> int:
        """The number of worker groups that there are at most."""
        return self.num_replicas if self.max_replicas is None else self.max_replicas

    @property
    def grows(self) -> bool:
        """Whether there may be more worker groups than those of the start."""
        return self.most > self.num_replicas


def _of_a_cluster(address: str) -> str:
    if address.startswith("ray://"):
        raise refuse("must be HOST:PORT of a cluster that this machine is part of, not of a client")
    return address


@dataclass(frozen=True, slots=True)
class RayConfig:
    """Where Ray puts the ranks of a worker group."""

    # fmt: off
    address: Annotated[Annotated[Text, AfterValidator(_of_a_cluster)], setting(
        "HOST:PORT of the head of the Ray cluster, which this machine must be part of",
        "--ray-address", key="ray_address",
        unsaid="RAY_ADDRESS, else the cluster of this machine")] = "auto"
    placement: Annotated[str, names(("pack", "strict_pack", "spread")), setting(
        "pack: on few machines; strict_pack: on one machine; spread: on many", key="ray.")] = "pack"
    resources: Annotated[dict[str, Annotated[float, Field(gt=0)]], setting(
        "what a rank takes of Ray's resources, beside one CPU and one GPU or NPU",
        key="ray.")] = field(default_factory=dict)
    # fmt: on

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class OmniDiffusionConfig:
    """Everything a worker group needs to know, with no default left to resolve.

    Attributes:
        model: local directory of the checkpoint.
        device: platform of the ranks.
        devices: comma-separated devices that the ranks may use, by the names that the device
            library understands; ``None`` for all visible ones.
        geometry: size that is warmed up, and of requests that name none; ``None``: the picture's.
        enforce_eager: no compilation; always true where the platform cannot compile.
        executor: ``inline`` (this process, one rank), ``mp`` (worker processes) or ``ray``.
        quantization: method and options of vLLM's linears, empty for none.
        action_root: trusted root of recorded camera paths.
        model_class_name: the model that the directory holds, where the deployment says so.
    """

    model: str
    device: str = "cpu"
    devices: str | None = None
    dtype: str = "bfloat16"
    parallel: DiffusionParallelConfig = field(default_factory=DiffusionParallelConfig)
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    replicas: ReplicaConfig = field(default_factory=ReplicaConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    geometry: VideoGeometry | None = None
    enforce_eager: bool = True
    executor: str = "inline"
    linear_backend: str = "native"
    quantization: Mapping[str, object] = field(default_factory=dict)
    action_root: str | None = None
    model_class_name: str | None = None

    # fmt: off
    max_num_seqs: Annotated[Positive, setting(
        "sessions open at once", "--max-num-seqs", aliases="max_batch_size")] = 1
    max_queued: Annotated[NotNegative, setting(
        "sessions that may wait for a place", "--max-queued")] = 16
    encode_on: Annotated[Literal["api", "worker"], setting(
        "what makes the H.264 of live worlds: the API process, or the root rank of each group",
        "--encode-on")] = "api"
    flow_shift: Annotated[FlowShift | None, setting(
        "flow shift of the model; a request may override it", "--flow-shift",
        unsaid="the checkpoint's")] = None
    attention_backend: Annotated[str, _ATTENTION_NAMES, setting(
        "implementation of the attention", "--diffusion-attention-backend",
        aliases="diffusion_attention_backend")] = "auto"
    chunk_timeout_s: Annotated[Seconds | None, setting(
        "limit of a chunk; the first two of a size have at least stage_init_timeout",
        unsaid="10 x the slowest warm chunk of the size, at least 60")] = None
    stage_init_timeout_s: Annotated[Seconds, setting(
        "seconds for a worker to start; begins anew while weights arrive", "--stage-init-timeout",
        key="stage_init_timeout")] = 300.0
    init_timeout_s: Annotated[Seconds, setting(
        "seconds for a server's engine to start, warm-up included", "--init-timeout",
        key="init_timeout")] = 1800.0
    env: Annotated[_Environment, setting(
        "environment of the workers, set before they start",
        secret=True)] = field(default_factory=dict, repr=False)
    text_encoder_device: Annotated[Literal["auto", "device", "cpu"], setting(
        "where the text encoder works: on the device, on the host (cpu: seconds for a prompt), or "
        "auto: on the device where a world fits beside it")] = "auto"
    reuse_last_step_kv: Annotated[bool, setting(
        "skip the commit forward: faster and lossy",
        key="model_config.lingbot_reuse_last_step_kv")] = False
    vae_spatial_sharding: Annotated[bool, setting(
        "share the decoding of each frame's width among the Ulysses ranks",
        key="model_config.lingbot_vae_spatial_sharding")] = True
    pixel_output_mode: Annotated[str, names(PIXEL_OUTPUT_MODES), setting(
        "how pixels reach the root rank", key="model_config.lingbot_pixel_output_mode",
        aliases="model_config.lingbot_npu_pixel_output_mode")] = "auto"
    leased_post_attention: Annotated[bool, setting(
        "replay captured graphs after attention",
        key="model_config.lingbot_npu_leased_post_attention")] = False
    npu_rotary_mul: Annotated[bool, setting(
        "rotary embedding by the NPU's fused operator",
        key="model_config.lingbot_npu_rotary_mul")] = False
    npu_quant: Annotated[Literal["w8a8"] | None, setting(
        "8-bit linears of the feed-forward part", key="model_config.lingbot_npu_quant")] = None
    npu_quant_scope: Annotated[Literal["ffn"], setting(
        "linears that npu_quant changes", key="model_config.lingbot_npu_quant_scope")] = "ffn"
    npu_quant_weight_format: Annotated[Literal["nz", "nd"], setting(
        "layout of 8-bit weights", key="model_config.lingbot_npu_quant_weight_format")] = "nz"
    # fmt: on

    def __post_init__(self) -> None:
        check_fields(self)
        if self.executor == "inline" and self.parallel.world_size > 1:
            raise ConfigError(
                f"one process cannot hold {self.parallel.world_size} ranks; set "
                "distributed_executor_backend to mp"
            )
        if self.executor == "inline" and self.replicas.most > 1:
            raise ConfigError(
                f"one process cannot hold {self.replicas.most} worker groups (num_replicas, "
                "max_replicas); set distributed_executor_backend to mp"
            )
        if self.replicas.grows and not (self.max_queued or self.replicas.spare):
            raise ConfigError(
                f"no replica beyond num_replicas={self.replicas.num_replicas} would ever start: "
                "nobody may wait (max_queued=0), and no place is kept free (elastic.spare=0); set "
                "elastic.spare to 1 or more, raise max_queued, or leave max_replicas out"
            )
        if self.geometry is not None:
            self.parallel.check_geometry(self.geometry)

    @property
    def prepared_geometry(self) -> VideoGeometry:
        """The size that memory is planned and blocks are compiled for."""
        return self.geometry or DEFAULT_GEOMETRY

    def of_replica(self, number: int) -> "OmniDiffusionConfig":
        """The configuration of one worker group, with devices of its own."""
        devices = self.replicas.devices
        return replace(self, devices=devices[number]) if devices else self


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets when it names no value of its own; ``None`` where nothing was set."""

    # fmt: off
    num_inference_steps: Annotated[Literal[4] | None, setting(
        "denoising steps", key=_SAMPLING)] = None
    max_sequence_length: Annotated[Literal[512] | None, setting(
        "prompt tokens", key=_SAMPLING)] = None
    height: Annotated[Side | None, setting("pixels, together with width", key=_SAMPLING)] = None
    width: Annotated[Side | None, setting("pixels, together with height", key=_SAMPLING)] = None
    num_frames: Annotated[Frames | None, setting("pixel frames, 9 + 12k", key=_SAMPLING)] = None
    seed: Annotated[Seed | None, setting("seed of the noise", key=_SAMPLING)] = None
    fps: Annotated[Fps | None, setting(
        "playback rate and time base of the camera; at 16 a chunk plays 750 ms",
        key=_SAMPLING)] = None
    output_type: Annotated[OutputType | None, setting("kind of array", key=_SAMPLING)] = None
    num_outputs_per_prompt: Annotated[Literal[1] | None, setting("videos", key=_SAMPLING)] = None
    generator_device: Annotated[Device | None, setting(
        "where noise is drawn; cpu: the same on every kind of device", key=_SAMPLING,
        unsaid="the stage's device")] = None
    extra_args: Annotated[dict[str, object], AfterValidator(_usable_extra_args), setting(
        "merged key by key with a request's; flow_shift among them",
        key=_SAMPLING)] = field(default_factory=dict)
    # fmt: on
