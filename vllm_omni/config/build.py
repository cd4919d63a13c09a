"""From a validated stage to the frozen configuration, with every default decided."""

from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from vllm_omni import envs
from vllm_omni.config.deploy import KVSection, ModelSection, SamplingSection
from vllm_omni.config.deployment import EngineArguments
from vllm_omni.config.schema import set_fields
from vllm_omni.diffusion.data import (
    ATTENTION_BACKENDS,
    DiffusionParallelConfig,
    KVCacheConfig,
    OmniDiffusionConfig,
    SamplingDefaults,
)
from vllm_omni.diffusion.geometry import VideoGeometry, chunks_of
from vllm_omni.errors import ConfigError, ConfigTypeError, InvalidRequestError

ENGINE_PATH = "vllm_omni.experimental.ar_diffusion.engine.ARDiffusionEngine"
DEFAULT_HEIGHT = 480
DEFAULT_WIDTH = 832


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a stage does not say itself.

    Attributes:
        model: directory of the checkpoint.
        device: platform the ranks run on.
        executor: used where the stage names none and one rank is enough.
    """

    model: Path
    device: str
    executor: str


def build_config(stage: EngineArguments, around: Surroundings) -> OmniDiffusionConfig:
    """Decide every default and refuse what the sections allow one by one but not together."""
    options = stage.model_options or ModelSection()
    parallel = build_parallel(stage)
    fitting = "mp" if parallel.world_size > 1 else around.executor
    backend = stage.distributed_executor_backend or fitting
    return OmniDiffusionConfig(
        model=str(around.model),
        device=around.device,
        devices=None if around.device == "cpu" else stage.devices,
        dtype=_dtype(stage.dtype, around.device),
        parallel=parallel,
        kv_cache=_kv_cache(options.ar_diffusion_kv_config or KVSection()),
        geometry=_geometry(options, engine_name(stage.engine_backend)),
        max_num_seqs=stage.max_num_seqs or 1,
        max_queued=16 if stage.max_queued is None else stage.max_queued,
        flow_shift=stage.flow_shift,
        enforce_eager=bool(stage.enforce_eager) or around.device != "cuda",
        executor="inline" if backend == "uni" else backend,
        attention_backend=_attention_backend(stage),
        linear_backend=_linear_backend(stage, options),
        quantization=_quantization(stage),
        action_root=_action_root(options),
        reuse_last_step_kv=bool(options.lingbot_reuse_last_step_kv),
        vae_spatial_sharding=options.lingbot_vae_spatial_sharding is not False,
        pixel_output_mode=options.lingbot_pixel_output_mode
        or options.lingbot_npu_pixel_output_mode
        or "auto",
        leased_post_attention=bool(options.lingbot_npu_leased_post_attention),
        npu_rotary_mul=bool(options.lingbot_npu_rotary_mul),
        npu_quant=options.lingbot_npu_quant,
        npu_quant_scope=options.lingbot_npu_quant_scope or "ffn",
        npu_quant_weight_format=options.lingbot_npu_quant_weight_format or "nz",
        env={name: str(value) for name, value in (stage.env or {}).items()},
        chunk_timeout_s=stage.chunk_timeout_s,
        stage_init_timeout_s=stage.stage_init_timeout or 300.0,
        init_timeout_s=stage.init_timeout or 600.0,
    )


def build_parallel(stage: EngineArguments) -> DiffusionParallelConfig:
    """Degrees of the stage.

    Raises:
        UnsupportedParallelismError: if this model does not run with them.
        ConfigError: if ``num_gpus`` is not their product.
    """
    section = stage.parallel_options
    given = {} if section is None else {key: value for key, _, value in set_fields(section)}
    parallel = replace(DiffusionParallelConfig(), **given)
    if stage.num_gpus not in {None, parallel.world_size}:
        raise ConfigError(
            f"num_gpus is {stage.num_gpus}, but tensor_parallel_size "
            f"{parallel.tensor_parallel_size} x ulysses_degree {parallel.ulysses_degree} makes "
            f"{parallel.world_size} ranks; set ulysses_degree so that the product fits"
        )
    return parallel


def build_sampling(
    section: SamplingSection | None, config: OmniDiffusionConfig
) -> SamplingDefaults:
    """Defaults of requests, refused early where no request could use them.

    Raises:
        ConfigError: naming the default.
    """
    if section is None:
        return SamplingDefaults()
    if section.generator_device not in {None, "cpu", config.device}:
        raise ConfigError(
            "default_sampling_params.generator_device must be cpu or the stage's device, which is "
            f"{config.device}; got {section.generator_device}"
        )
    try:
        if section.height is not None and section.width is not None:
            config.parallel.check_geometry(VideoGeometry(section.height, section.width))
        if section.num_frames is not None:
            chunks_of(section.num_frames)
    except InvalidRequestError as error:
        raise ConfigError(f"default_sampling_params.{error}") from None
    return SamplingDefaults(
        num_inference_steps=section.num_inference_steps,
        max_sequence_length=section.max_sequence_length,
        height=section.height,
        width=section.width,
        num_frames=section.num_frames,
        seed=section.seed,
        fps=section.fps,
        output_type=section.output_type,
        num_outputs_per_prompt=section.num_outputs_per_prompt,
        generator_device=section.generator_device,
        extra_args=section.extra_args or {},
    )


def engine_name(backend: object) -> str:
    """``"default"`` or ``"ar_diffusion"``.

    Raises:
        ConfigError: if an import path leads nowhere.
        ConfigTypeError: if it leads to something that is not the engine.
    """
    if backend is None or backend == "default":
        return "default"
    if backend == ENGINE_PATH:  # by name, so that nothing heavy is imported to find out
        return "ar_diffusion"
    target = _import_path(backend) if isinstance(backend, str) else backend
    if isinstance(target, type) and f"{target.__module__}.{target.__qualname__}" == ENGINE_PATH:
        return "ar_diffusion"
    raise ConfigTypeError(
        f"engine_backend {backend!r} is not an engine of this package; use 'default' or "
        f"{ENGINE_PATH!r}"
    )


def _import_path(path: str) -> object:
    module, _, name = path.rpartition(".")
    try:
        found = vars(import_module(module)) if module else {}
    except ImportError as error:
        raise ConfigError(f"engine_backend {path!r} cannot be imported: {error}") from None
    if name not in found:
        raise ConfigError(
            f"engine_backend {path!r} cannot be imported; use 'default' or {ENGINE_PATH!r}"
        )
    return found[name]


def _dtype(given: str | None, device: str) -> str:
    if given in {None, "auto"}:
        return "float32" if device == "cpu" else "bfloat16"
    return str(given)


def _kv_cache(section: KVSection) -> KVCacheConfig:
    defaults = KVCacheConfig()
    return KVCacheConfig(
        gpu_memory_fraction=section.gpu_memory_fraction or defaults.gpu_memory_fraction,
        window_chunks=section.window_chunks or None,
        sink_chunks=section.sink_chunks or 0,
        page_tokens=section.page_tokens or defaults.page_tokens,
    )


def _geometry(options: ModelSection, engine: str) -> VideoGeometry | None:
    height, width = options.ar_diffusion_height, options.ar_diffusion_width
    if height is None and width is None and engine == "default":
        return None
    try:
        return VideoGeometry(
            DEFAULT_HEIGHT if height is None else height, DEFAULT_WIDTH if width is None else width
        )
    except InvalidRequestError as error:
        raise ConfigError(f"model_config.ar_diffusion_{error}") from None


def _attention_backend(stage: EngineArguments) -> str:
    if stage.attention_backend is not None and stage.attention_config is not None:
        raise ConfigError("attention_backend and attention_config are two names of one setting")
    if stage.attention_config is None:
        return stage.attention_backend or "auto"
    chosen: object = stage.attention_config
    for key in ("default", "backend"):
        if isinstance(chosen, dict) and set(chosen) == {key}:
            chosen = chosen[key]
    section = EngineArguments.model_validate({"attention_backend": chosen}) if isinstance(
        chosen, str
    ) else None  # fmt: skip
    if section is None or section.attention_backend is None:
        raise ConfigError(
            'attention_config must be {"backend": NAME} or {"default": {"backend": NAME}} with '
            f"NAME one of {', '.join(ATTENTION_BACKENDS)}, got {stage.attention_config!r}"
        )
    return section.attention_backend


def _linear_backend(stage: EngineArguments, options: ModelSection) -> str:
    quantization = stage.quantization_config
    chosen = stage.linear_backend or ("native" if quantization is None else "vllm")
    if quantization is not None and options.lingbot_npu_quant is not None:
        raise ConfigError(
            f"quantization_config ({quantization.method}) and lingbot_npu_quant "
            f"({options.lingbot_npu_quant}) are two quantisations; give one"
        )
    if quantization is not None and chosen != "vllm":
        raise ConfigError(
            f"quantization_config.method {quantization.method} needs linear_backend vllm, got "
            f"{chosen}"
        )
    if chosen == "vllm" and find_spec("vllm") is None:
        reason = "linear_backend vllm"
        if quantization is not None:
            reason = f"quantization_config.method {quantization.method}"
        raise ConfigError(
            f"{reason} runs on vLLM's linears, and vLLM is not installed; install it or leave "
            "the setting out"
        )
    return chosen


def _quantization(stage: EngineArguments) -> dict[str, object]:
    section = stage.quantization_config
    if section is None:
        return {}
    return {"method": section.method, "ignored_layers": tuple(section.ignored_layers or ())}


def _action_root(options: ModelSection) -> str | None:
    root = options.lingbot_action_root or envs.action_root()
    if root is None:
        return None
    directory = Path(root).expanduser()
    if not directory.is_dir():
        raise ConfigError(f"lingbot_action_root {root!r} is not a directory")
    return str(directory)
