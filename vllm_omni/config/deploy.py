"""The mappings inside a stage of a deploy file, one pydantic model each."""

from math import inf
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from vllm_omni.config.schema import Section, ignored, refused
from vllm_omni.diffusion.data import PIXEL_OUTPUT_MODES

PIPELINE = "lingbot_world"
MODEL_CLASS = "LingBotWorldCausalDMDPipeline"
INFERENCE_STEPS = 4
MAX_SEQUENCE_LENGTH = 512

Degree = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def one_of(value: str, known: tuple[str, ...], aliases: dict[str, str]) -> str:
    """The known name that ``value`` means, in any case."""
    name = aliases.get(value.lower(), value.lower())
    if name not in known:
        raise ValueError(f"must be one of {', '.join(known)}, got {value!r}")
    return name


class ParallelSection(Section):
    """``parallel_config``: how the ranks share one world."""

    tensor_parallel_size: Degree | None = Field(
        default=None, description="ranks that share each linear"
    )
    ulysses_degree: Degree | None = Field(
        default=None, description="ranks that share the tokens of each latent frame"
    )
    sequence_parallel_size: Degree | None = Field(
        default=None, description="must equal ulysses_degree where both are given"
    )
    ring_degree: Degree | None = Field(default=None, description="only 1")
    allgather_degree: Degree | None = Field(default=None, description="only 1")
    ulysses_mode: Literal["strict", "advanced_uaa"] | None = Field(
        default=None, description="only strict"
    )
    ulysses_a2a_permute: bool | None = Field(default=None, description="only false")
    cfg_parallel_size: Degree | None = Field(default=None, description="only 1")
    pipeline_parallel_size: Degree | None = Field(default=None, description="only 1")
    data_parallel_size: Degree | None = Field(default=None, description="only 1")
    vae_patch_parallel_size: Degree | None = Field(default=None, description="only 1")
    enable_expert_parallel: bool | None = Field(default=None, description="only false")
    use_hsdp: bool | None = Field(default=None, description="only false")
    vae_parallel_mode: Annotated[
        Literal["tile", "spatial_shard_height", "spatial_shard_width"] | None,
        ignored(
            "the model shards its VAE by model_config.lingbot_vae_spatial_sharding", quiet=["tile"]
        ),
    ] = None
    text_encoder_tp_size: Annotated[
        Degree | None, ignored("every rank runs the text encoder", quiet=[1])
    ] = None
    hsdp_shard_size: Annotated[
        int | None, ignored("weights are not sharded that way", quiet=[-1])
    ] = None
    hsdp_replicate_size: Annotated[
        int | None, ignored("weights are not sharded that way", quiet=[1])
    ] = None
    mask_sp_padding: Annotated[bool | None, ignored("tokens are never padded", quiet=[False])] = (
        None
    )


class KVSection(Section):
    """``model_config.ar_diffusion_kv_config``: memory and shape of the KV window."""

    gpu_memory_fraction: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of the memory free after loading, for all sessions",
    )
    window_chunks: int | None = Field(
        default=None,
        ge=0,
        description="latent frames of the rolling part; 0 or null: the checkpoint's",
    )
    sink_chunks: int | None = Field(
        default=None, ge=0, description="latent frames kept for ever; 0: the checkpoint's"
    )
    page_tokens: Degree | None = Field(default=None, description="tokens per page of the pool")
    enable: Annotated[bool | None, ignored("the window is always on", quiet=[True])] = None
    warmup_cudagraph: Annotated[
        bool | None, ignored("warm-up always runs until the window has rolled", quiet=[False])
    ] = None
    warmup_capture_reset: Annotated[
        bool | None, ignored("warm-up frees its session", quiet=[False])
    ] = None
    chunk_size: Annotated[int | None, ignored("tokens per latent frame follow from the size")] = (
        None
    )
    reuse_history_staging: Annotated[
        bool | None, ignored("the window needs no staging", quiet=[False])
    ] = None
    reset_at_boundary: Annotated[
        bool | None, refused("it would forget the window between chunks")
    ] = None

    @field_validator("window_chunks")
    @classmethod
    def _holds_a_chunk(cls, value: int | None) -> int | None:
        if value in {1, 2}:
            raise ValueError(f"the rolling part must hold a chunk of 3 latent frames, got {value}")
        return value


class ModelSection(Section):
    """``model_config``: options of the world model."""

    ar_diffusion_height: int | None = Field(
        default=None, description="pixels, a multiple of 16; 480"
    )
    ar_diffusion_width: int | None = Field(
        default=None, description="pixels, a multiple of 16; 832"
    )
    ar_diffusion_kv_config: KVSection | None = Field(default=None, description="see its own table")
    lingbot_action_root: Text | None = Field(
        default=None, description="trusted root of recorded camera paths"
    )
    lingbot_reuse_last_step_kv: bool | None = Field(
        default=None, description="skip the commit forward: faster and lossy"
    )
    lingbot_vae_spatial_sharding: bool | None = Field(
        default=None,
        description="share the decoding of each frame's width among the Ulysses ranks; true",
    )
    lingbot_vae_decode_fast_path: Annotated[
        str | bool | None, ignored("the decoder is exact", quiet=["off"])
    ] = None
    lingbot_pixel_output_mode: str | None = Field(
        default=None, description=f"how pixels reach the root rank: {', '.join(PIXEL_OUTPUT_MODES)}"
    )
    lingbot_npu_pixel_output_mode: str | None = Field(
        default=None, description="older name of lingbot_pixel_output_mode"
    )
    lingbot_npu_leased_post_attention: bool | None = Field(
        default=None, description="replay captured graphs after attention"
    )
    lingbot_npu_rotary_mul: bool | None = Field(
        default=None, description="rotary embedding by the NPU's fused operator; false"
    )
    lingbot_npu_quant: Literal["w8a8"] | None = Field(default=None, description="8-bit FFN: w8a8")
    lingbot_npu_quant_scope: Literal["ffn"] | None = Field(default=None, description="ffn")
    lingbot_npu_quant_weight_format: Literal["nz", "nd"] | None = Field(
        default=None, description="nz, nd"
    )

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
        return None if value is None else one_of(value, PIXEL_OUTPUT_MODES, {})

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
    ignored_layers: list[str] | None = Field(
        default=None, description="linears that stay as they are"
    )


class SamplingSection(Section):
    """``default_sampling_params``: what a request gets when it names no value of its own."""

    num_inference_steps: int | None = Field(default=None, description=f"only {INFERENCE_STEPS}")
    max_sequence_length: int | None = Field(default=None, description=f"only {MAX_SEQUENCE_LENGTH}")
    height: int | None = Field(default=None, description="pixels")
    width: int | None = Field(default=None, description="pixels")
    num_frames: int | None = Field(default=None, ge=1, description="pixel frames, 9 + 12k")
    seed: int | None = Field(default=None, description="of the noise")
    fps: Positive | None = Field(default=None, description="time base of the camera")
    output_type: Literal["pil", "np", "latent"] | None = Field(
        default=None, description="pil, np, latent"
    )
    num_outputs_per_prompt: Literal[1] | None = Field(default=None, description="only 1")
    generator_device: Literal["cpu", "cuda", "npu"] | None = Field(
        default=None,
        description="where noise is drawn; null: the stage's device; cpu: the same on every kind",
    )
    extra_args: dict[str, object] | None = Field(
        default=None, description="merged key by key with a request's; flow_shift among them"
    )
    guidance_scale: Annotated[float | None, ignored("the model is distilled without guidance")] = (
        None
    )
    guidance_scale_2: Annotated[
        float | None, ignored("the model is distilled without guidance")
    ] = None
    true_cfg_scale: Annotated[float | None, ignored("the model is distilled without guidance")] = (
        None
    )
    boundary_ratio: Annotated[float | None, ignored("there is one transformer")] = None
    negative_prompt: Annotated[str | None, ignored("the model is distilled without guidance")] = (
        None
    )

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
        if shift is None:
            return value
        if isinstance(shift, bool) or not isinstance(shift, int | float) or not 0 < shift < inf:
            raise ValueError(f"flow_shift must be a finite number above 0, got {shift!r}")
        return value
