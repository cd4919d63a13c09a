"""The resolved configuration of an engine: frozen, complete, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.errors import ConfigError, UnsupportedParallelismError

DTYPES = ("bfloat16", "float16", "float32")
DEVICES = ("cpu", "cuda", "npu")
EXECUTORS = ("inline", "mp")
ATTENTION_BACKENDS = ("auto", "sdpa", "flash", "npu_fusion", "reference")
LINEAR_BACKENDS = ("native", "vllm")
PIXEL_OUTPUT_MODES = ("auto", "native", "root_float", "root_uint8_allgather", "root_uint8_p2p")


@dataclass(frozen=True, slots=True)
class DiffusionParallelConfig:
    """Parallel degrees of one worker group.

    Attributes:
        tensor_parallel_size: ranks that share the weights of each linear.
        ulysses_degree: ranks that share the tokens of each latent frame.
        sequence_parallel_size: must equal ``ulysses_degree``; 0 means "not given".
    """

    tensor_parallel_size: int = 1
    ulysses_degree: int = 1
    ring_degree: int = 1
    allgather_degree: int = 1
    sequence_parallel_size: int = 0
    ulysses_mode: str = "strict"
    ulysses_a2a_permute: bool = False
    cfg_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    vae_patch_parallel_size: int = 1
    vae_parallel_mode: str = "tile"
    text_encoder_tp_size: int = 1
    enable_expert_parallel: bool = False
    use_hsdp: bool = False
    hsdp_shard_size: int = -1
    hsdp_replicate_size: int = 1
    mask_sp_padding: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "ulysses_degree", "ring_degree", "allgather_degree",
                     "cfg_parallel_size", "pipeline_parallel_size", "data_parallel_size",
                     "vae_patch_parallel_size", "text_encoder_tp_size"):  # fmt: skip
            if self.__getattribute__(name) < 1:
                raise ConfigError(
                    f"parallel_config.{name} must be at least 1, got {self.__getattribute__(name)}"
                )
        if self.sequence_parallel_size not in {0, self.ulysses_degree}:
            raise UnsupportedParallelismError(
                f"parallel_config.sequence_parallel_size is {self.sequence_parallel_size} but "
                f"ulysses_degree is {self.ulysses_degree}; set both to the same number or leave "
                "sequence_parallel_size out"
            )
        self._refuse_unsupported()

    def _refuse_unsupported(self) -> None:
        refused = {
            "ring_degree": self.ring_degree > 1,
            "allgather_degree": self.allgather_degree > 1,
            "ulysses_mode": self.ulysses_mode != "strict",
            "ulysses_a2a_permute": self.ulysses_a2a_permute,
            "cfg_parallel_size": self.cfg_parallel_size > 1,
            "pipeline_parallel_size": self.pipeline_parallel_size > 1,
            "data_parallel_size": self.data_parallel_size > 1,
            "vae_patch_parallel_size": self.vae_patch_parallel_size > 1,
            "enable_expert_parallel": self.enable_expert_parallel,
            "use_hsdp": self.use_hsdp,
        }
        for name, bad in refused.items():
            if bad:
                raise UnsupportedParallelismError(
                    f"parallel_config.{name}={self.__getattribute__(name)!r} is not supported for "
                    "LingBot-World; use ulysses_degree and tensor_parallel_size"
                )

    @property
    def world_size(self) -> int:
        """Number of worker processes."""
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
                f"ulysses_degree {self.ulysses_degree} does not divide; choose another size or "
                "degree"
            )


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """Memory and shape of the paged KV window (``model_config.ar_diffusion_kv_config``).

    Attributes:
        gpu_memory_fraction: share of the memory that is free after loading, for all sessions.
            On CPU the pool is sized by ``max_num_seqs`` instead.
        window_chunks: latent frames of the rolling part (not chunks, despite the name); ``None`` is
            the checkpoint's.
        sink_chunks: latent frames that are kept for ever, likewise; 0 is the checkpoint's.
        page_tokens: tokens per page of the pool.
    """

    gpu_memory_fraction: float = 0.1
    window_chunks: int | None = None
    sink_chunks: int = 0
    page_tokens: int = 128

    def __post_init__(self) -> None:
        if not 0.0 < self.gpu_memory_fraction <= 1.0:
            raise ConfigError(
                "ar_diffusion_kv_config.gpu_memory_fraction must be in (0, 1], got "
                f"{self.gpu_memory_fraction}"
            )
        if self.page_tokens < 1:
            raise ConfigError(f"page_tokens must be at least 1, got {self.page_tokens}")


@dataclass(frozen=True, slots=True)
class OmniDiffusionConfig:
    """Everything a worker group needs to know, with no default left to resolve.

    Attributes:
        model: local directory of the checkpoint.
        geometry: size that is warmed up and that requests get when they name none; ``None``
            derives the size from the picture.
        devices: comma-separated devices that the ranks may use, ``None`` for all visible ones.
        max_num_seqs: sessions open at once.
        max_queued: sessions that may wait for a place.
        enforce_eager: no compilation; always true where the platform cannot compile.
        executor: ``inline`` (this process, one rank) or ``mp`` (worker processes).
        quantization: method and options of vLLM's linears, empty for none.
        action_root: trusted root of recorded camera paths.
        npu_rotary_mul: turn queries and keys by the device's fused operator.
        env: environment of the workers, set before they start.
        chunk_timeout_s: limit of a chunk; ``None`` for ten times the slowest warm chunk, at
            least 60 s.
        stage_init_timeout_s: limit of the start of one worker.
        init_timeout_s: limit of the start of a server's engine, warm-up included.
    """

    model: str
    device: str = "cpu"
    devices: str | None = None
    dtype: str = "bfloat16"
    parallel: DiffusionParallelConfig = field(default_factory=DiffusionParallelConfig)
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    geometry: VideoGeometry | None = None
    max_num_seqs: int = 1
    max_queued: int = 16
    flow_shift: float | None = None
    enforce_eager: bool = True
    executor: str = "inline"
    attention_backend: str = "auto"
    linear_backend: str = "native"
    quantization: Mapping[str, object] = field(default_factory=dict)
    action_root: str | None = None
    reuse_last_step_kv: bool = False
    vae_spatial_sharding: bool = True
    pixel_output_mode: str = "auto"
    leased_post_attention: bool = False
    npu_rotary_mul: bool = False
    npu_quant: str | None = None
    npu_quant_scope: str = "ffn"
    npu_quant_weight_format: str = "nz"
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    chunk_timeout_s: float | None = None
    stage_init_timeout_s: float = 300.0
    init_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("dtype", self.dtype, DTYPES),
            ("device", self.device, DEVICES),
            ("distributed_executor_backend", self.executor, EXECUTORS),
            ("attention_backend", self.attention_backend, ATTENTION_BACKENDS),
            ("linear_backend", self.linear_backend, LINEAR_BACKENDS),
            ("lingbot_pixel_output_mode", self.pixel_output_mode, PIXEL_OUTPUT_MODES),
        ):
            if value not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if self.max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.executor == "inline" and self.parallel.world_size > 1:
            raise ConfigError(
                f"one process cannot hold {self.parallel.world_size} ranks; set "
                "distributed_executor_backend to mp"
            )
        if self.geometry is not None:
            self.parallel.check_geometry(self.geometry)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets when it names no value of its own; ``None`` where nothing was set."""

    num_inference_steps: int | None = None
    max_sequence_length: int | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    seed: int | None = None
    fps: float | None = None
    output_type: str | None = None
    num_outputs_per_prompt: int | None = None
    generator_device: str | None = None
    extra_args: Mapping[str, object] = field(default_factory=dict)
