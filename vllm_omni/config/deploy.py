"""The sections of a deploy file, one pydantic model each.

A stage may spell some settings in two ways (flat degrees, ``engine_args``, ``runtime``, older
names); :mod:`vllm_omni.config.layers` brings them into the one spelling that stands here.
"""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from vllm_omni.config.schema import Section, ignored, refused
from vllm_omni.diffusion.data import (
    ATTENTION_BACKENDS,
    DEVICES,
    DTYPES,
    LINEAR_BACKENDS,
    PIXEL_OUTPUT_MODES,
)

PIPELINE = "lingbot_world"
MODEL_CLASS = "LingBotWorldCausalDMDPipeline"
INFERENCE_STEPS = 4
MAX_SEQUENCE_LENGTH = 512
_DTYPE_NAMES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
}  # fmt: skip
_ATTENTION_NAMES = {
    "torch_sdpa": "sdpa", "flash_attn": "flash", "flash_attention": "flash",
    "ascend": "npu_fusion", "ascend_attn": "npu_fusion",
}  # fmt: skip

Degree = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _one_of(value: str, known: tuple[str, ...], aliases: dict[str, str]) -> str:
    name = aliases.get(value.lower(), value.lower())
    if name not in known:
        raise ValueError(f"must be one of {', '.join(known)}, got {value!r}")
    return name


class ParallelSection(Section):
    """``parallel_config``: how the ranks share one world."""

    tensor_parallel_size: Degree | None = Field(None, description="ranks that share each linear")
    ulysses_degree: Degree | None = Field(
        None, description="ranks that share the tokens of each latent frame"
    )
    sequence_parallel_size: Degree | None = Field(
        None, description="must equal ulysses_degree where both are given"
    )
    ring_degree: Degree | None = Field(None, description="only 1")
    allgather_degree: Degree | None = Field(None, description="only 1")
    ulysses_mode: Literal["strict", "advanced_uaa"] | None = Field(None, description="only strict")
    ulysses_a2a_permute: bool | None = Field(None, description="only false")
    cfg_parallel_size: Degree | None = Field(None, description="only 1")
    pipeline_parallel_size: Degree | None = Field(None, description="only 1")
    data_parallel_size: Degree | None = Field(None, description="only 1")
    vae_patch_parallel_size: Degree | None = Field(None, description="only 1")
    enable_expert_parallel: bool | None = Field(None, description="only false")
    use_hsdp: bool | None = Field(None, description="only false")
    vae_parallel_mode: Literal["tile", "spatial_shard_height", "spatial_shard_width"] | None = (
        ignored("the model shards its VAE by model_config.lingbot_vae_spatial_sharding",
                quiet=["tile"])
    )  # fmt: skip
    text_encoder_tp_size: Degree | None = ignored("every rank runs the text encoder", quiet=[1])
    hsdp_shard_size: int | None = ignored("weights are not sharded that way", quiet=[-1])
    hsdp_replicate_size: int | None = ignored("weights are not sharded that way", quiet=[1])
    mask_sp_padding: bool | None = ignored("tokens are never padded", quiet=[False])


class KVSection(Section):
    """``model_config.ar_diffusion_kv_config``: memory and shape of the KV window."""

    gpu_memory_fraction: float | None = Field(
        None, gt=0, le=1, description="share of the memory free after loading, for all sessions"
    )
    window_chunks: int | None = Field(
        None, ge=0, description="latent frames of the rolling part; 0 or null: the checkpoint's"
    )
    sink_chunks: int | None = Field(
        None, ge=0, description="latent frames kept for ever; 0: the checkpoint's"
    )
    page_tokens: Degree | None = Field(None, description="tokens per page of the pool")
    enable: bool | None = ignored("the window is always on", quiet=[True])
    warmup_cudagraph: bool | None = ignored(
        "warm-up always runs until the window has rolled", quiet=[False]
    )
    warmup_capture_reset: bool | None = ignored("warm-up frees its session", quiet=[False])
    chunk_size: int | None = ignored("tokens per latent frame follow from the size")
    reuse_history_staging: bool | None = ignored("the window needs no staging", quiet=[False])
    reset_at_boundary: bool | None = refused("it would forget the window between chunks")

    @field_validator("window_chunks")
    @classmethod
    def _holds_a_chunk(cls, value: int | None) -> int | None:
        if value in {1, 2}:
            raise ValueError(f"the rolling part must hold a chunk of 3 latent frames, got {value}")
        return value


class ModelSection(Section):
    """``model_config``: options of the world model."""

    ar_diffusion_height: int | None = Field(None, description="pixels, a multiple of 16; 480")
    ar_diffusion_width: int | None = Field(None, description="pixels, a multiple of 16; 832")
    ar_diffusion_kv_config: KVSection | None = Field(None, description="see its own table")
    lingbot_action_root: Text | None = Field(
        None, description="trusted root of recorded camera paths"
    )
    lingbot_reuse_last_step_kv: bool | None = Field(
        None, description="skip the commit forward: faster and lossy"
    )
    lingbot_vae_spatial_sharding: bool | None = Field(
        None, description="share the decoding of each frame's width among the Ulysses ranks; true"
    )
    lingbot_vae_decode_fast_path: str | bool | None = Field(None, description="off, exact")
    lingbot_pixel_output_mode: str | None = Field(
        None, description=f"how pixels reach the root rank: {', '.join(PIXEL_OUTPUT_MODES)}"
    )
    lingbot_npu_pixel_output_mode: str | None = Field(
        None, description="older name of lingbot_pixel_output_mode"
    )
    lingbot_npu_leased_post_attention: bool | None = Field(
        None, description="replay captured graphs after attention"
    )
    lingbot_npu_quant: Literal["w8a8"] | None = Field(None, description="8-bit FFN: w8a8")
    lingbot_npu_quant_scope: Literal["ffn"] | None = Field(None, description="ffn")
    lingbot_npu_quant_weight_format: Literal["nz", "nd"] | None = Field(None, description="nz, nd")

    @field_validator("lingbot_vae_decode_fast_path")
    @classmethod
    def _exact_or_off(cls, value: object) -> object:
        if value is None:
            return None
        if value is False:  # YAML reads a bare `off` as false
            return "off"
        if value == "fused":
            raise ValueError("'fused' changes the pixels and is refused; choose off or exact")
        if value not in {"off", "exact"}:
            raise ValueError(f"must be off or exact, got {value!r}")
        return value

    @field_validator("lingbot_pixel_output_mode", "lingbot_npu_pixel_output_mode")
    @classmethod
    def _known_mode(cls, value: str | None) -> str | None:
        return None if value is None else _one_of(value, PIXEL_OUTPUT_MODES, {})

    @model_validator(mode="after")
    def _one_pixel_mode(self) -> "ModelSection":
        both = {self.lingbot_pixel_output_mode, self.lingbot_npu_pixel_output_mode} - {None}
        if len(both) > 1:
            raise ValueError(
                f"lingbot_pixel_output_mode is {self.lingbot_pixel_output_mode!r} but "
                f"lingbot_npu_pixel_output_mode is {self.lingbot_npu_pixel_output_mode!r}; "
                "give one of the two names"
            )
        return self


class QuantizationSection(Section):
    """``quantization_config``: a method of vLLM's linears."""

    method: Literal["fp8", "fp8_per_tensor", "ascend"]
    ignored_layers: list[str] | None = Field(None, description="linears that stay as they are")


class SamplingSection(Section):
    """``default_sampling_params``: what a request gets when it names no value of its own."""

    num_inference_steps: int | None = Field(None, description=f"only {INFERENCE_STEPS}")
    max_sequence_length: int | None = Field(None, description=f"only {MAX_SEQUENCE_LENGTH}")
    height: int | None = Field(None, description="pixels")
    width: int | None = Field(None, description="pixels")
    num_frames: int | None = Field(None, ge=1, description="pixel frames, 9 + 12k")
    seed: int | None = Field(None, description="of the noise")
    fps: Positive | None = Field(None, description="time base of the camera")
    output_type: Literal["pil", "np", "latent"] | None = Field(None, description="pil, np, latent")
    num_outputs_per_prompt: Literal[1] | None = Field(None, description="only 1")
    extra_args: dict[str, object] | None = Field(
        None, description="merged key by key with a request's; flow_shift among them"
    )
    guidance_scale: float | None = ignored("the model is distilled without guidance")
    guidance_scale_2: float | None = ignored("the model is distilled without guidance")
    true_cfg_scale: float | None = ignored("the model is distilled without guidance")
    boundary_ratio: float | None = ignored("there is one transformer")
    negative_prompt: str | None = ignored("the model is distilled without guidance")

    @model_validator(mode="after")
    def _fixed_by_the_model(self) -> "SamplingSection":
        for key, value, only in (
            ("num_inference_steps", self.num_inference_steps, INFERENCE_STEPS),
            ("max_sequence_length", self.max_sequence_length, MAX_SEQUENCE_LENGTH),
        ):
            if value not in {None, only}:
                raise ValueError(f"{key} of this model is {only}, got {value}")
        if (self.height is None) != (self.width is None):
            raise ValueError("give height and width together")
        return self

    @field_validator("extra_args")
    @classmethod
    def _usable_shift(cls, value: dict[str, object] | None) -> dict[str, object] | None:
        shift = None if value is None else value.get("flow_shift")
        if shift is not None and not (type(shift) in {int, float} and 0 < shift < float("inf")):
            raise ValueError(f"flow_shift must be a finite number above 0, got {shift!r}")
        return value


class StageSection(Section):
    """One entry of ``stages``: the model, its devices and how it runs."""

    stage_id: int | None = Field(None, description="required in a file; only 0")
    devices: Text | None = Field(None, description='visible devices, for example "0,1,2,3"')
    device: str | None = Field(None, description=f"{', '.join(DEVICES)}; found by default")
    dtype: str | None = Field(
        None, description="auto, bfloat16, float16, float32; auto is bfloat16, float32 on CPU"
    )
    distributed_executor_backend: Literal["mp", "uni", "inline"] | None = Field(
        None, description="mp: worker processes; uni or inline: in this process, one rank"
    )
    env: dict[str, str | int] | None = Field(
        None, description="environment of the workers; read before they start"
    )
    max_num_seqs: Degree | None = Field(None, description="sessions open at once")
    max_queued: int | None = Field(None, ge=0, description="sessions waiting for a place; 16")
    enforce_eager: bool | None = Field(None, description="no compilation; false compiles on CUDA")
    flow_shift: Positive | None = Field(None, description="the model's; a request may override it")
    model_class_name: str | None = Field(None, description=f"only {MODEL_CLASS}")
    engine_backend: object = Field(
        None, description='"default" or the import path of ARDiffusionEngine'
    )
    step_execution: bool | None = Field(None, description="control between chunks")
    streaming_output: bool | None = Field(None, description="one output per chunk")
    chunk_timeout_s: Positive | None = Field(
        None, description="limit of a chunk; by default 10 times the slowest warm one, 60 at least"
    )
    attention_backend: str | None = Field(None, description=", ".join(ATTENTION_BACKENDS))
    attention_config: dict[str, object] | None = Field(
        None, description='{"backend": NAME} or {"default": {"backend": NAME}}'
    )
    linear_backend: str | None = Field(None, description=", ".join(LINEAR_BACKENDS))
    quantization_config: QuantizationSection | None = Field(None, description="see its own table")
    parallel_options: ParallelSection | None = Field(
        None, alias="parallel_config", description="see its own table"
    )
    model_options: ModelSection | None = Field(
        None, alias="model_config", description="see its own table"
    )
    default_sampling_params: SamplingSection | None = Field(None, description="see its own table")

    num_replicas: int | None = refused("one worker group serves", neutral=[1])
    cache_backend: str | None = refused(
        "reusing activations between steps changes the video", neutral=["none", ""]
    )
    cache_config: dict[str, object] | None = refused(
        "reusing activations between steps changes the video", neutral=[{}]
    )
    vae_use_tiling: bool | None = refused("blending tiles changes the pixels")
    enable_cpu_offload: bool | None = refused("weights stay on their device")
    enable_layerwise_offload: bool | None = refused("weights stay on their device")
    enable_distributed_layerwise_offload: bool | None = refused("weights stay on their device")
    diffusion_offload_config: dict[str, object] | None = refused(
        "weights stay on their device", neutral=[{}]
    )
    diffusion_compile_granularity: str | None = refused(
        "blocks are compiled one by one", neutral=["regional"]
    )
    diffusion_load_format: str | None = refused(
        "weights come from the checkpoint (`vllm-omni tiny-checkpoint` writes a random one)",
        neutral=["default", "auto"],
    )
    kv_cache_dtype: str | None = refused("it cannot be consumed by a diffusion stage", neutral=[])
    seed: int | None = refused(
        "it cannot be consumed by a diffusion stage; use default_sampling_params.seed", neutral=[]
    )
    use_v2_model_runner: bool | None = refused("this stage has no model runner choice")
    static_lora_scale: float | None = refused("adapters are not loaded", neutral=[])
    lora_path: str | None = refused("adapters are not loaded", neutral=[])
    lora_backend: str | None = refused("adapters are not loaded", neutral=[])

    model: str | None = ignored("the model is the one that was asked for")
    model_arch: str | None = ignored("the model is the one that was asked for")
    trust_remote_code: bool | None = ignored("no code of a checkpoint is ever run", quiet=[False])
    default_pooling_params: object = ignored("nothing is pooled")
    subtalker_sampling_params: object = ignored("there is no speech")
    vae_use_slicing: bool | None = ignored("one video is decoded at a time", quiet=[False])
    vae_fast_path: Literal["off", "lossless", "channels_last"] | None = ignored(
        "the VAE picks the memory layout of its platform", quiet=["lossless"]
    )
    diffusion_compile_dynamic: bool | None = ignored("shapes are known when blocks are compiled")
    num_weight_load_threads: int | None = ignored("how weights are read does not change them")
    disable_multithread_weight_load: bool | None = ignored(
        "how weights are read does not change them", quiet=[False]
    )
    enable_broadcast_weight_load: bool | None = ignored(
        "how weights are read does not change them", quiet=[False]
    )
    enable_diffusion_pipeline_profiler: bool | None = ignored(
        "the timings of every chunk are always reported", quiet=[False]
    )

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str | None) -> str | None:
        return None if value is None else _one_of(value, ("auto", *DTYPES), _DTYPE_NAMES)

    @field_validator("attention_backend")
    @classmethod
    def _known_attention(cls, value: str | None) -> str | None:
        return None if value is None else _one_of(value, ATTENTION_BACKENDS, _ATTENTION_NAMES)

    @field_validator("linear_backend")
    @classmethod
    def _known_linear(cls, value: str | None) -> str | None:
        return None if value is None else _one_of(value, LINEAR_BACKENDS, {})

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str | None) -> str | None:
        return None if value is None else _one_of(value, DEVICES, {})

    @field_validator("model_class_name")
    @classmethod
    def _known_class(cls, value: str | None) -> str | None:
        if value not in {None, MODEL_CLASS}:
            raise ValueError(f"must be {MODEL_CLASS}, got {value!r}")
        return value

    @field_validator("devices")
    @classmethod
    def _distinct_devices(cls, value: str | None) -> str | None:
        if value is None:
            return None
        names = [name.strip() for name in value.split(",")]
        if not all(names) or len(set(names)) < len(names):
            raise ValueError(f"must list different devices, separated by commas, got {value!r}")
        return ",".join(names)
