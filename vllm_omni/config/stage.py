"""Settings that resolution itself acts on: what a stage says, and what is decided from it.

All other settings are declared where the workers read them, in :mod:`vllm_omni.diffusion.data`.
"""

import os
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

from pydantic import AfterValidator

from vllm_omni import envs
from vllm_omni.diffusion.data import DEFAULT_GEOMETRY, Device, OmniDiffusionConfig, SamplingDefaults
from vllm_omni.diffusion.geometry import VideoGeometry, chunks_of
from vllm_omni.diffusion.registry import MODELS
from vllm_omni.errors import ConfigError, ConfigTypeError, InvalidRequestError
from vllm_omni.setting import Positive, Text, names, setting
from vllm_omni.system_errors import expand_home, reason
from vllm_omni.wording import refuse

ENGINE_PATH = "vllm_omni.experimental.ar_diffusion.engine.ARDiffusionEngine"
"""Size of the chunk engine where the stage names none."""

_MODEL = "model_config."
_QUANTIZATION = "quantization_config."
_DTYPE_NAMES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
}  # fmt: skip


def _distinct(value: str) -> str:
    devices = [name.strip() for name in value.split(",")]
    if not all(devices) or len(set(devices)) < len(devices):
        raise refuse("must list different devices, separated by commas")
    return ",".join(devices)


_Devices = Annotated[Text, AfterValidator(_distinct)]
_DType = Annotated[str, names(("auto", "bfloat16", "float16", "float32"), _DTYPE_NAMES)]
_Linears = Annotated[str, names(("native", "vllm"))]
_Executor = Annotated[str, names(("mp", "ray", "uni", "inline"), {"multi_process": "mp"})]
_ModelClass = Annotated[str, names(MODELS)]
_Quantization = Annotated[str, names(("fp8", "fp8_per_tensor", "ascend"))]


@dataclass(frozen=True, slots=True)
class StageSettings:
    """What a stage says; :func:`decide` fills in the rest."""

    # fmt: off
    device: Annotated[Device | None, setting(
        "platform of the ranks", "--device", unsaid="found by its device nodes")] = None
    devices: Annotated[_Devices | None, setting(
        'devices of the ranks, for example "0,1,2,3": numbers count the entries of '
        'CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES where it is set, UUIDs and names of MIG '
        'slices pass; refused where the machine shows none and device does not say cpu',
        unsaid="all")] = None
    dtype: Annotated[_DType, setting(
        "kind of floats", "--dtype", unsaid="auto: bfloat16, float32 on CPU")] = "auto"
    distributed_executor_backend: Annotated[_Executor | None, setting(
        "mp: worker processes; ray: actors of a Ray cluster; uni or inline: in this process, one "
        "rank", "--distributed-executor-backend --worker-backend", aliases="worker_backend",
        unsaid="mp for a server, several ranks or several replicas")] = None
    engine_backend: Annotated[object, setting(
        "`default` or the import path of ARDiffusionEngine")] = "default"
    step_execution: Annotated[bool, setting("control between chunks", "--step-execution")] = False
    streaming_output: Annotated[bool, setting(
        "one output per chunk", "--diffusion-streaming-output",
        aliases="diffusion_streaming_output")] = False
    enforce_eager: Annotated[bool | None, setting(
        "do not compile; false compiles on CUDA", "--enforce-eager",
        unsaid="compile on CUDA")] = None
    linear_backend: Annotated[_Linears | None, setting(
        "implementation of the linears", "--linear-backend",
        unsaid="native; vllm with quantization_config")] = None
    quantization: Annotated[_Quantization | None, setting(
        "method of vLLM's linears", key=_QUANTIZATION + "method")] = None
    ignored_layers: Annotated[list[str] | None, setting(
        "linears that stay as they are", key=_QUANTIZATION)] = None
    height: Annotated[int | None, setting(
        "pixels, a multiple of 16: what is warmed up, and what requests get that name no size",
        key=_MODEL + "ar_diffusion_height",
        unsaid="480 with ARDiffusionEngine, else no size is warmed up")] = None
    width: Annotated[int | None, setting(
        "as the height", key=_MODEL + "ar_diffusion_width",
        unsaid="832 with ARDiffusionEngine, else no size is warmed up")] = None
    action_root: Annotated[Text | None, setting(
        "trusted root of recorded camera paths", key=_MODEL + "lingbot_action_root")] = None
    num_gpus: Annotated[Positive | None, setting(
        "must equal the number of ranks", "--num-gpus")] = None
    model_class_name: Annotated[_ModelClass | None, setting(
        "class of the pipeline", "--model-class-name")] = None
    # fmt: on


@dataclass(frozen=True, slots=True)
class Host:
    """What a stage leaves to the program that reads it.

    Attributes:
        platform: ``cpu``, ``cuda`` or ``npu``: what the machine has.
        visible_devices: how many devices there are; ``None`` to find out.
        executor: ``mp`` or ``inline``, used where the stage names none and one rank is enough.
    """

    platform: str
    visible_devices: int | None
    executor: str


def engine_name(backend: object) -> str:
    """Return ``"default"`` or ``"ar_diffusion"``, whichever the setting means.

    Raises:
        ConfigError: if an import path leads nowhere.
        ConfigTypeError: if it leads to something that is not the engine.
    """
    if backend == "default":
        return "default"
    if backend == ENGINE_PATH:  # by name, so that nothing heavy is imported to find out
        return "ar_diffusion"
    target = _import_path(backend) if isinstance(backend, str) else backend
    if isinstance(target, type) and f"{target.__module__}.{target.__qualname__}" == ENGINE_PATH:
        return "ar_diffusion"
    raise ConfigTypeError(
        f"engine_backend {backend!r} is not an engine of this package; use default or {ENGINE_PATH}"
    )


def _import_path(path: str) -> object:
    module, _, name = path.rpartition(".")
    try:
        found = vars(import_module(module)) if module else {}
    except ImportError as error:
        raise ConfigError(f"engine_backend {path!r} cannot be imported: {error}") from None
    if name not in found:
        raise ConfigError(
            f"engine_backend {path!r} cannot be imported; use default or {ENGINE_PATH}"
        )
    return found[name]


def decide(
    stage: StageSettings, *, host: Host, ranks: int, replicas: int, is_quantised: bool
) -> StageSettings:
    """The stage with every choice made.

    Args:
        ranks: size of the world.
        replicas: number of worker groups at most.
        is_quantised: whether the model section quantises the linears by itself.

    Raises:
        ConfigError: what the settings allow one by one but not together.
    """
    device = stage.device or host.platform
    fitting = "mp" if ranks * replicas > 1 else host.executor
    executor = stage.distributed_executor_backend or fitting
    if executor == "ray" and find_spec("ray") is None:
        raise ConfigError(
            "distributed_executor_backend ray needs Ray, which is not installed; install this "
            "package with its extra ray, as on the machines of the cluster, or choose mp"
        )
    dtype = stage.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    engine = engine_name(stage.engine_backend)
    height, width = stage.height, stage.width
    if engine != "default" or height is not None or width is not None:
        height = DEFAULT_GEOMETRY.height if height is None else height
        width = DEFAULT_GEOMETRY.width if width is None else width
    if stage.num_gpus not in {None, ranks}:
        raise ConfigError(
            f"num_gpus is {stage.num_gpus}, but tensor_parallel_size x ulysses_degree makes "
            f"{ranks} ranks; set ulysses_degree so that the product fits"
        )
    return replace(
        stage,
        device=device,
        devices=None if device == "cpu" or executor == "ray" else stage.devices,
        dtype=dtype,
        distributed_executor_backend=executor,
        engine_backend=engine,
        enforce_eager=bool(stage.enforce_eager) or device != "cuda",
        linear_backend=_linear_backend(stage, is_quantised=is_quantised),
        height=height,
        width=width,
        action_root=_action_root(stage.action_root or envs.action_root()),
    )


def decided_fields(stage: StageSettings) -> dict[str, object]:
    """What a decided stage gives to the fields of :class:`OmniDiffusionConfig`."""
    backend, ignored = stage.distributed_executor_backend, tuple(stage.ignored_layers or ())
    quantization = {"method": stage.quantization, "ignored_layers": ignored}
    same = (
        "device", "devices", "dtype", "enforce_eager", "linear_backend", "action_root",
        "model_class_name",
    )  # fmt: skip
    return {name: getattr(stage, name) for name in same} | {
        "executor": "inline" if backend == "uni" else backend,
        "quantization": {} if stage.quantization is None else quantization,
        "geometry": _geometry(stage),
    }


def check_sampling(defaults: SamplingDefaults, config: OmniDiffusionConfig) -> None:
    """Refuse defaults that no request could use; raises ConfigError naming the default."""
    if defaults.generator_device not in {None, "cpu", config.device}:
        raise ConfigError(
            "default_sampling_params.generator_device must be cpu or the stage's device, which is "
            f"{config.device}; got {defaults.generator_device}"
        )
    if (defaults.height is None) != (defaults.width is None):
        raise ConfigError("default_sampling_params: give height and width together")
    try:
        if defaults.height is not None and defaults.width is not None:
            config.parallel.check_geometry(VideoGeometry(defaults.height, defaults.width))
        if defaults.num_frames is not None:
            chunks_of(defaults.num_frames)
    except InvalidRequestError as error:
        raise ConfigError(f"default_sampling_params.{error}") from None


def _geometry(stage: StageSettings) -> VideoGeometry | None:
    if stage.height is None or stage.width is None:
        return None
    try:
        return VideoGeometry(stage.height, stage.width)
    except InvalidRequestError as error:
        raise ConfigError(f"model_config.ar_diffusion_{error}") from None


def _linear_backend(stage: StageSettings, *, is_quantised: bool) -> str:
    method = stage.quantization
    chosen = stage.linear_backend or ("native" if method is None else "vllm")
    if method is None and stage.ignored_layers is not None:
        raise ConfigError("quantization_config.method: is required with ignored_layers")
    if method is not None and is_quantised:
        raise ConfigError(
            f"quantization_config ({method}) and lingbot_npu_quant are two quantisations; give one"
        )
    if method is not None and chosen != "vllm":
        raise ConfigError(
            f"quantization_config.method {method} needs linear_backend vllm, got {chosen}"
        )
    if chosen == "vllm" and find_spec("vllm") is None:
        reason = "linear_backend vllm" if method is None else f"quantization_config.method {method}"
        raise ConfigError(
            f"{reason} runs on vLLM's linears, and vLLM is not installed; install it or leave "
            "the setting out"
        )
    return chosen


def _action_root(root: str | None) -> str | None:
    if root is None:
        return None
    try:
        directory = expand_home(root)
        if not directory.is_dir():
            raise ConfigError(f"lingbot_action_root {root!r} is not a directory")
        with os.scandir(directory):
            return str(directory)
    except OSError as error:
        raise ConfigError(f"lingbot_action_root {root!r}: {reason(error)}") from None
