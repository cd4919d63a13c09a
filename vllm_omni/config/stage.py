"""A stage of a deploy file.

It may spell some settings in two ways (flat degrees, ``engine_args``, ``runtime``, older names);
:mod:`vllm_omni.config.layers` brings them into the one spelling that stands here.
"""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from vllm_omni.config.deploy import (
    MODEL_CLASS,
    Degree,
    ModelSection,
    ParallelSection,
    Positive,
    QuantizationSection,
    SamplingSection,
    Text,
    one_of,
)
from vllm_omni.config.schema import Section, ignored, refused
from vllm_omni.diffusion.data import ATTENTION_BACKENDS, DEVICES, DTYPES, LINEAR_BACKENDS

_DTYPE_NAMES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
}  # fmt: skip
_ATTENTION_NAMES = {
    "torch_sdpa": "sdpa", "flash_attn": "flash", "flash_attention": "flash",
    "ascend": "npu_fusion", "ascend_attn": "npu_fusion",
}  # fmt: skip


class StageSection(Section):
    """One entry of ``stages``: the model, its devices and how it runs."""

    stage_id: int | None = Field(default=None, description="required in a file; only 0")
    devices: Text | None = Field(
        default=None,
        description='visible devices, for example "0,1,2,3"; refused where the machine shows none '
        "and device does not say cpu",
    )
    device: str | None = Field(default=None, description=f"{', '.join(DEVICES)}; found by default")
    dtype: str | None = Field(
        default=None,
        description="auto, bfloat16, float16, float32; auto is bfloat16, float32 on CPU",
    )
    distributed_executor_backend: Literal["mp", "uni", "inline"] | None = Field(
        default=None,
        description="mp: worker processes; uni or inline: in this process, one rank. By default mp "
        "for a server or several ranks",
    )
    env: dict[str, str | int] | None = Field(
        default=None, description="environment of the workers; read before they start"
    )
    max_num_seqs: Degree | None = Field(default=None, description="sessions open at once")
    max_queued: int | None = Field(
        default=None, ge=0, description="sessions waiting for a place; 16"
    )
    enforce_eager: bool | None = Field(
        default=None, description="no compilation; false compiles on CUDA"
    )
    flow_shift: Positive | None = Field(
        default=None, description="the model's; a request may override it"
    )
    model_class_name: str | None = Field(default=None, description=f"only {MODEL_CLASS}")
    engine_backend: object = Field(
        default=None, description='"default" or the import path of ARDiffusionEngine'
    )
    step_execution: bool | None = Field(default=None, description="control between chunks")
    streaming_output: bool | None = Field(default=None, description="one output per chunk")
    chunk_timeout_s: Positive | None = Field(
        default=None,
        description="limit of a chunk; by default 10 times the slowest warm one, 60 at least",
    )
    attention_backend: str | None = Field(default=None, description=", ".join(ATTENTION_BACKENDS))
    attention_config: dict[str, object] | None = Field(
        default=None, description='{"backend": NAME} or {"default": {"backend": NAME}}'
    )
    linear_backend: str | None = Field(default=None, description=", ".join(LINEAR_BACKENDS))
    quantization_config: QuantizationSection | None = Field(
        default=None, description="see its own table"
    )
    parallel_options: ParallelSection | None = Field(
        default=None, alias="parallel_config", description="see its own table"
    )
    model_options: ModelSection | None = Field(
        default=None, alias="model_config", description="see its own table"
    )
    default_sampling_params: SamplingSection | None = Field(
        default=None, description="see its own table"
    )

    num_replicas: Annotated[int | None, refused("one worker group serves", neutral=[1])] = None
    cache_backend: Annotated[
        str | None,
        refused("reusing activations between steps changes the video", neutral=["none", ""]),
    ] = None
    cache_config: Annotated[
        dict[str, object] | None,
        refused("reusing activations between steps changes the video", neutral=[{}]),
    ] = None
    vae_use_tiling: Annotated[bool | None, refused("blending tiles changes the pixels")] = None
    enable_cpu_offload: Annotated[bool | None, refused("weights stay on their device")] = None
    enable_layerwise_offload: Annotated[bool | None, refused("weights stay on their device")] = None
    enable_distributed_layerwise_offload: Annotated[
        bool | None, refused("weights stay on their device")
    ] = None
    diffusion_offload_config: Annotated[
        dict[str, object] | None, refused("weights stay on their device", neutral=[{}])
    ] = None
    diffusion_compile_granularity: Annotated[
        str | None, refused("blocks are compiled one by one", neutral=["regional"])
    ] = None
    diffusion_load_format: Annotated[
        str | None,
        refused(
            "weights come from the checkpoint (`vllm-omni tiny-checkpoint` writes a random one)",
            neutral=["default", "auto"],
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str | None, refused("it cannot be consumed by a diffusion stage", neutral=[])
    ] = None
    seed: Annotated[
        int | None,
        refused(
            "it cannot be consumed by a diffusion stage; use default_sampling_params.seed",
            neutral=[],
        ),
    ] = None
    use_v2_model_runner: Annotated[
        bool | None, refused("this stage has no model runner choice")
    ] = None
    static_lora_scale: Annotated[float | None, refused("adapters are not loaded", neutral=[])] = (
        None
    )
    lora_path: Annotated[str | None, refused("adapters are not loaded", neutral=[])] = None
    lora_backend: Annotated[str | None, refused("adapters are not loaded", neutral=[])] = None

    model: Annotated[str | None, ignored("the model is the one that was asked for")] = None
    model_arch: Annotated[str | None, ignored("the model is the one that was asked for")] = None
    trust_remote_code: Annotated[
        bool | None, ignored("no code of a checkpoint is ever run", quiet=[False])
    ] = None
    default_pooling_params: Annotated[object, ignored("nothing is pooled")] = None
    subtalker_sampling_params: Annotated[object, ignored("there is no speech")] = None
    vae_use_slicing: Annotated[
        bool | None, ignored("one video is decoded at a time", quiet=[False])
    ] = None
    vae_fast_path: Annotated[
        Literal["off", "lossless", "channels_last"] | None,
        ignored("the VAE picks the memory layout of its platform", quiet=["lossless"]),
    ] = None
    diffusion_compile_dynamic: Annotated[
        bool | None, ignored("shapes are known when blocks are compiled")
    ] = None
    num_weight_load_threads: Annotated[
        int | None, ignored("how weights are read does not change them")
    ] = None
    disable_multithread_weight_load: Annotated[
        bool | None, ignored("how weights are read does not change them", quiet=[False])
    ] = None
    enable_broadcast_weight_load: Annotated[
        bool | None, ignored("how weights are read does not change them", quiet=[False])
    ] = None
    enable_diffusion_pipeline_profiler: Annotated[
        bool | None, ignored("the timings of every chunk are always reported", quiet=[False])
    ] = None

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str | None) -> str | None:
        return None if value is None else one_of(value, ("auto", *DTYPES), _DTYPE_NAMES)

    @field_validator("attention_backend")
    @classmethod
    def _known_attention(cls, value: str | None) -> str | None:
        return None if value is None else one_of(value, ATTENTION_BACKENDS, _ATTENTION_NAMES)

    @field_validator("linear_backend")
    @classmethod
    def _known_linear(cls, value: str | None) -> str | None:
        return None if value is None else one_of(value, LINEAR_BACKENDS, {})

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str | None) -> str | None:
        return None if value is None else one_of(value, DEVICES, {})

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
