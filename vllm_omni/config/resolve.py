"""One resolver for deploy files, flags and keyword arguments.

From the strongest to the weakest: per-stage override, flag or keyword argument, deploy file,
platform section of the file, default. What is refused is refused here, before a worker starts.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_omni import envs
from vllm_omni.config.deploy_file import DeployFile, load_deploy_file
from vllm_omni.config.devices import (
    check_devices,
    device_names,
    devices_of_replicas,
    refuse_missing_devices,
)
from vllm_omni.config.keys import KEYS, Layer, Merged, Values, merge_layers, name_of, read_layer
from vllm_omni.config.stage import Host, StageSettings, check_sampling, decide, decided_fields
from vllm_omni.diffusion.data import (
    DiffusionParallelConfig,
    KVCacheConfig,
    OmniDiffusionConfig,
    RayConfig,
    ReplicaConfig,
    SamplingDefaults,
)
from vllm_omni.diffusion.registry import ModelEntry, model_of
from vllm_omni.errors import ConfigError, ConfigTypeError
from vllm_omni.model_extras import find_checkpoint, get_model_class_name, require_model
from vllm_omni.setting import HIDDEN, Setting, construct, no_effect_notes, values_of

STAGE_ORIGIN = "stage override"
_FOLLOWS = {"linear_backend": "quantization_config.method"}
"""Key whose default is decided by another one."""
_REMOVED = {
    "diffusion_batch_size": "max_num_seqs",
    "log_requests": "--enable-log-requests of the server",
}
_STAGE_KEY = re.compile(r"stage_(\d+)_(\w+)")


@dataclass(frozen=True, slots=True)
class EffectiveValue:
    """One setting: its dotted key, its effective value, and where that came from.

    Attributes:
        shown: the value, or in words what a default means.
    """

    key: str
    shown: object
    origin: str

    def __str__(self) -> str:
        return f"{self.key} = {self.shown} ({self.origin})"


@dataclass(frozen=True, slots=True)
class ResolvedDeployment:
    """A deployment with nothing left to decide.

    Attributes:
        model: what the checkpoint holds.
        streaming_output: one output per chunk instead of one per request.
        step_execution: requests without a camera of their own are steered live.
        engine_backend: ``"default"`` or ``"ar_diffusion"``.
        origins: each effective value and where it came from.
        no_effect: one line for each setting that was accepted and does nothing.
    """

    model: ModelEntry
    config: OmniDiffusionConfig
    default_sampling_params: SamplingDefaults
    streaming_output: bool
    step_execution: bool
    engine_backend: str
    origins: tuple[EffectiveValue, ...]
    no_effect: tuple[str, ...]


def resolve(
    model: str,
    *,
    deploy_config: str | Path | None = None,
    overrides: Mapping[str, object] | None = None,
    stage_overrides: Mapping[str, object] | str | None = None,
    platform: str = "cpu",
    visible_devices: int | None = None,
    executor: str = "inline",
    source: str = "keyword argument",
) -> ResolvedDeployment:
    """Resolve everything that was said about an engine.

    Args:
        model: checkpoint directory or hub id.
        overrides: flags or keyword arguments that were given; ``None`` values count as not
            given, ``stage_0_KEY`` is a per-stage override.
        stage_overrides: ``{"0": {...}}``, as a mapping or as JSON.
        platform: ``cpu``, ``cuda`` or ``npu``: what the machine has, where no setting names a
            device.
        visible_devices: how many devices there are; ``None`` to find out.
        executor: ``mp`` or ``inline``, where no setting names one; several ranks take ``mp``.
        source: what the overrides are called in messages.

    Raises:
        ConfigError: what cannot be honoured, in one line; also a ``ValueError``.
        ConfigTypeError: a removed argument or a wrong kind of engine; also a ``TypeError``.
        ConfigNotFoundError: no such deploy file; also a ``FileNotFoundError``.
        CheckpointError: a directory that does not hold this model.
    """
    require_model(model)
    envs.check()
    host = Host(platform, visible_devices, executor)
    file = None if deploy_config is None else load_deploy_file(deploy_config)
    general, per_stage = _split_overrides(overrides or {})
    above = [read_layer(general, source, where=source, warn=False)]
    staged = [] if stage_overrides is None else [stage_zero(stage_overrides, "stage_overrides")]
    above += [
        read_layer(raw, STAGE_ORIGIN, where=STAGE_ORIGIN) for raw in (*staged, per_stage) if raw
    ]
    weaker = []
    if file is not None:
        parts = ((file.top, "top level"), (file.stage, "stage 0"))
        weaker = [_file_layer(raw, file.origin, part) for raw, part in parts]
    device = merge_layers([*weaker, *above]).values.get("device") or platform
    weakest = [] if file is None else _platform_layers(file, device)
    return _decided(merge_layers([*weakest, *weaker, *above]), model, file, host)


def _decided(merged: Merged, model: str, file: DeployFile | None, host: Host) -> ResolvedDeployment:
    values = merged.values
    for key, value in values.items():
        if key in KEYS and value is not None:
            origin = merged.origins[key]
            KEYS[key].refuse(value, f"{origin}: {name_of(KEYS[key], origin)}")
    said = construct(StageSettings, values)
    if said.devices is not None and said.device is None and host.platform == "cpu":
        refuse_missing_devices(said.devices)
    directory = find_checkpoint(model)
    entry = model_of(directory, said.model_class_name)
    parallel = construct(DiffusionParallelConfig, values)
    replicas = construct(ReplicaConfig, values)
    npu_quant = values.get("model_config.lingbot_npu_quant")
    stage = decide(
        said,
        host=host,
        ranks=parallel.world_size,
        replicas=replicas.most,
        is_quantised=npu_quant is not None,
    )
    config = construct(
        OmniDiffusionConfig,
        values,
        model=str(directory),
        parallel=parallel,
        kv_cache=construct(KVCacheConfig, values),
        replicas=replicas,
        ray=construct(RayConfig, values),
        **decided_fields(stage),
    )
    check_devices(config, host.visible_devices)
    config = _with_device_names(config)
    sampling = construct(SamplingDefaults, values)
    check_sampling(sampling, config)
    entry.check_checkpoint(directory, config.parallel)
    return ResolvedDeployment(
        model=entry,
        config=config,
        default_sampling_params=sampling,
        streaming_output=stage.streaming_output,
        step_execution=stage.step_execution,
        engine_backend=str(stage.engine_backend),
        origins=tuple(
            _effective(
                (stage, parallel, config, replicas, config.ray, config.kv_cache, sampling), merged
            )
        ),
        no_effect=(
            *(() if file is None else file.no_effect),
            *no_effect_notes(values, KEYS),
            *_platform_notes(said, config),
            *_hidden_notes(merged),
            *_class_notes(said, directory),
        ),
    )


def _with_device_names(config: OmniDiffusionConfig) -> OmniDiffusionConfig:
    """The configuration with devices as the device library knows them, those of each replica."""
    if config.replicas.most == 1 or config.device == "cpu" or config.executor == "ray":
        return replace(config, devices=device_names(config.device, config.devices, config.env))
    shares = [
        device_names(config.device, share, config.env) or ""
        for share in devices_of_replicas(
            config.devices, ranks=config.parallel.world_size, replicas=config.replicas.most
        )
    ]
    return replace(
        config, devices=",".join(shares), replicas=replace(config.replicas, devices=tuple(shares))
    )


def _effective(owners: Iterable[object], merged: Merged) -> Iterator[EffectiveValue]:
    for owner in owners:
        for one, value in values_of(owner):
            for key, shown in _lines(one, value):
                yield EffectiveValue(key, shown, _origin(key, merged))


def _lines(setting: Setting, value: object) -> Iterator[tuple[str, object]]:
    """Key and shown value; a mapping with free keys has one line for each."""
    if setting.is_open and isinstance(value, Mapping):
        for name, inner in value.items():
            yield f"{setting.key}.{name}", HIDDEN if setting.secret else inner
    elif setting.unsaid and value == setting.default:
        yield setting.key, setting.unsaid
    elif value is not None:
        yield setting.key, value


def _origin(key: str, merged: Merged) -> str:
    is_action_root = key == "model_config.lingbot_action_root"
    if is_action_root and merged.values.get(key) is None and envs.action_root() is not None:
        return "environment"
    return merged.origins.get(key) or merged.origins.get(_FOLLOWS.get(key, ""), "default")


def _platform_notes(said: StageSettings, config: OmniDiffusionConfig) -> list[str]:
    notes = []
    if config.executor == "ray" and said.devices is not None:
        notes.append(f"devices={said.devices} has no effect: Ray gives each rank its device")
    elif config.device == "cpu" and said.devices is not None:
        notes.append(f"devices={said.devices} has no effect: the CPU is one device")
    if config.executor != "ray" and config.ray != RayConfig():
        notes.append("ray_address and ray have no effect: distributed_executor_backend is not ray")
    if config.device != "cuda" and said.enforce_eager is False:
        notes.append("enforce_eager=false has no effect: blocks are compiled on CUDA only")
    return notes


def _class_notes(said: StageSettings, directory: Path) -> list[str]:
    if said.model_class_name is None:
        return []
    named = get_model_class_name(directory)
    if said.model_class_name == named:
        return []
    return [
        f"_class_name {named!r:.100} of model_index.json has no effect: model_class_name says "
        f"{said.model_class_name}"
    ]


def _hidden_notes(merged: Merged) -> list[str]:
    return [
        f"{key} of {origin} has no effect: the stage itself sets it"
        for key, origin, by in merged.hidden
        if ", platforms." in origin and by == origin.partition(", platforms.")[0]
    ]


def _platform_layers(file: DeployFile, device: object) -> list[Layer]:
    """The layer of this platform; the sections of others are checked all the same."""
    layers = {
        name: _file_layer(stage, f"{file.origin}, platforms.{name}", "stage 0")
        for name, stage in file.platform_stages.items()
    }
    for name, layer in layers.items():
        if "device" in layer.values:
            raise ConfigError(f"{file.path}: platforms.{name} cannot set device")
    return [layer for name, layer in layers.items() if name == device]


def _file_layer(raw: Mapping[str, object], origin: str, part: str) -> Layer:
    settings = {key: value for key, value in raw.items() if key != "stage_id"}
    return read_layer(settings, origin, where=f"{origin}: {part}", flat_wins=False)


def _split_overrides(overrides: Mapping[str, object]) -> tuple[Values, Values]:
    """General values and those of ``stage_0_KEY``; removed arguments are named."""
    given = {key: value for key, value in overrides.items() if value is not None}
    for key in ("stage_configs", "stage_configs_path"):
        if key in given:
            raise ConfigError(f"{key} was removed; pass the file as deploy_config")
    for key, instead in _REMOVED.items():
        if key in given:
            raise ConfigTypeError(f"{key} is not an argument; use {instead}")
    extras = given.pop("extras", {})
    if not isinstance(extras, Mapping):
        raise ConfigTypeError(f"extras must be a mapping, got {extras!r}")
    general: Values = {**extras}
    per_stage: Values = {}
    for key, value in given.items():
        match = _STAGE_KEY.fullmatch(key)
        if match is None:
            general[key] = value
            continue
        if int(match[1]) != 0:
            raise ConfigError(f"{key}: unknown stage {match[1]}; this pipeline has one stage, 0")
        per_stage[match[2]] = value
    if "default_sampling_params" in general:
        general["default_sampling_params"] = stage_zero(
            general["default_sampling_params"], "default_sampling_params"
        )
    return general, per_stage


def stage_zero(value: object, name: str) -> Values:
    """What ``{"0": {...}}``, as a mapping or as JSON text, says about stage 0.

    Raises:
        ConfigError: if it is not that, or names another stage.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f'{name} must look like {{"0": {{...}}}}, got {value!r}')
    found: Values = {}
    for stage_id, settings in value.items():
        if str(stage_id) != "0":
            raise ConfigError(f"{name}: unknown stage {stage_id!r}; this pipeline has one stage, 0")
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{name}: stage 0 must be a mapping, got {settings!r}")
        found |= settings
    return found
