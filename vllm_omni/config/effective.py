"""The effective values of a deployment and where each came from, for one look at start-up.

The environment of the workers is shown by name alone: its values may be secrets.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_omni import envs
from vllm_omni.config.build import engine_name
from vllm_omni.config.deployment import EngineArguments
from vllm_omni.config.schema import HIDDEN
from vllm_omni.diffusion.data import OmniDiffusionConfig

DEFAULT_ORIGIN = "default"
_ACTION_ROOT = "model_config.lingbot_action_root"
_KV = "model_config.ar_diffusion_kv_config"
_SINK_CHUNKS = f"{_KV}.sink_chunks"
_CHECKPOINTS = "the checkpoint's"
_UNSAID = {
    "devices": "all",
    "flow_shift": _CHECKPOINTS,
    "chunk_timeout_s": "10 x the slowest warm chunk, at least 60",
    "model_config.ar_diffusion_height": "no size is warmed up",
    "model_config.ar_diffusion_width": "no size is warmed up",
    f"{_KV}.window_chunks": _CHECKPOINTS,
    _SINK_CHUNKS: _CHECKPOINTS,
}
"""What is meant by a setting that was not given and has no value of its own."""
_ALSO = {
    "model_config.lingbot_pixel_output_mode": "model_config.lingbot_npu_pixel_output_mode",
    "linear_backend": "quantization_config",
    "attention_backend": "attention_config",
}


@dataclass(frozen=True, slots=True)
class EffectiveValue:
    """One setting: its dotted key, its effective value, and where that came from."""

    key: str
    value: object
    origin: str

    @property
    def shown(self) -> object:
        """The value, or in words what is meant where nothing was said."""
        unsaid = self.value is None or (self.value == 0 and self.key == _SINK_CHUNKS)
        return _UNSAID.get(self.key, self.value) if unsaid else self.value

    def __str__(self) -> str:
        return f"{self.key} = {self.shown} ({self.origin})"


def effective_values(
    stage: EngineArguments, config: OmniDiffusionConfig, origins: Mapping[str, str]
) -> tuple[EffectiveValue, ...]:
    """All settings in the spelling of the deploy file."""
    return tuple(
        EffectiveValue(key, value, _origin(key, origins))
        for key, value in (
            *_stage_values(stage, config),
            *_parallel_values(config),
            *_model_values(config),
            *_sampling_values(stage),
        )
    )


def _origin(key: str, origins: Mapping[str, str]) -> str:
    for name in (key, _ALSO.get(key)):
        found = [origins[leaf] for leaf in origins if leaf == name or leaf.startswith(f"{name}.")]
        if found:
            return found[-1]
    if key == _ACTION_ROOT and envs.action_root() is not None:
        return "environment"
    return DEFAULT_ORIGIN


def _stage_values(
    stage: EngineArguments, config: OmniDiffusionConfig
) -> tuple[tuple[str, object], ...]:
    return (
        ("device", config.device),
        ("devices", config.devices),
        ("dtype", config.dtype),
        ("distributed_executor_backend", config.executor),
        ("engine_backend", engine_name(stage.engine_backend)),
        ("step_execution", bool(stage.step_execution)),
        ("streaming_output", bool(stage.streaming_output)),
        ("max_num_seqs", config.max_num_seqs),
        ("max_queued", config.max_queued),
        ("enforce_eager", config.enforce_eager),
        ("flow_shift", config.flow_shift),
        ("attention_backend", config.attention_backend),
        ("linear_backend", config.linear_backend),
        ("quantization_config", dict(config.quantization) or None),
        ("chunk_timeout_s", config.chunk_timeout_s),
        ("stage_init_timeout", config.stage_init_timeout_s),
        ("init_timeout", config.init_timeout_s),
        *((f"env.{name}", HIDDEN) for name in config.env),
    )


def _parallel_values(config: OmniDiffusionConfig) -> tuple[tuple[str, object], ...]:
    return (
        ("parallel_config.tensor_parallel_size", config.parallel.tensor_parallel_size),
        ("parallel_config.ulysses_degree", config.parallel.ulysses_degree),
    )


def _model_values(config: OmniDiffusionConfig) -> tuple[tuple[str, object], ...]:
    geometry, kv = config.geometry, config.kv_cache
    values = {
        "ar_diffusion_height": None if geometry is None else geometry.height,
        "ar_diffusion_width": None if geometry is None else geometry.width,
        "ar_diffusion_kv_config.gpu_memory_fraction": kv.gpu_memory_fraction,
        "ar_diffusion_kv_config.window_chunks": kv.window_chunks,
        "ar_diffusion_kv_config.sink_chunks": kv.sink_chunks,
        "ar_diffusion_kv_config.page_tokens": kv.page_tokens,
        "lingbot_action_root": config.action_root,
        "lingbot_reuse_last_step_kv": config.reuse_last_step_kv,
        "lingbot_vae_spatial_sharding": config.vae_spatial_sharding,
        "lingbot_pixel_output_mode": config.pixel_output_mode,
        "lingbot_npu_leased_post_attention": config.leased_post_attention,
        "lingbot_npu_rotary_mul": config.npu_rotary_mul,
        "lingbot_npu_quant": config.npu_quant,
        "lingbot_npu_quant_scope": config.npu_quant_scope,
        "lingbot_npu_quant_weight_format": config.npu_quant_weight_format,
    }
    return tuple((f"model_config.{key}", value) for key, value in values.items())


def _sampling_values(stage: EngineArguments) -> tuple[tuple[str, object], ...]:
    section = stage.default_sampling_params
    if section is None:
        return ()
    return tuple(
        (f"default_sampling_params.{key}", value)
        for key, value in dict(section).items()
        if key in section.model_fields_set
    )
