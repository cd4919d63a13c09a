"""One resolver for deploy files, flags and keyword arguments.

From the strongest to the weakest: per-stage override, flag or keyword argument, deploy file,
platform section of the file, default. What is refused is refused here, before a worker starts.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_omni.config.build import Surroundings, build_config, build_sampling, engine_name
from vllm_omni.config.checkpoint import (
    attention_heads,
    check_model_index,
    find_checkpoint,
    require_model,
)
from vllm_omni.config.deployment import EngineArguments
from vllm_omni.config.devices import (
    check_device_count,
    refuse_missing_devices,
    visible_device_count,
)
from vllm_omni.config.effective import EffectiveValue, effective_values
from vllm_omni.config.layers import (
    OTHER_SPELLINGS,
    Layer,
    Merged,
    Values,
    canonical_stage,
    merge_layers,
)
from vllm_omni.config.loader import DeployFile, load_deploy_file
from vllm_omni.config.schema import no_effect_notes, parse_section
from vllm_omni.config.stage import StageSection
from vllm_omni.diffusion.data import OmniDiffusionConfig, SamplingDefaults
from vllm_omni.errors import ConfigError, ConfigTypeError

STAGE_ORIGIN = "stage override"
_REMOVED = {
    "diffusion_batch_size": "max_num_seqs",
    "log_requests": "--enable-log-requests of the server",
}
_STAGE_KEY = re.compile(r"stage_(\d+)_(\w+)")
_TOP_KEYS = (
    "dtype",
    "distributed_executor_backend",
    "quantization",
    "pipeline_parallel_size",
    "data_parallel_size",
)


@dataclass(frozen=True, slots=True)
class ResolvedDeployment:
    """A deployment with nothing left to decide.

    Attributes:
        streaming_output: one output per chunk instead of one per request.
        step_execution: requests without a camera of their own are steered live.
        engine_backend: ``"default"`` or ``"ar_diffusion"``.
        origins: each effective value and where it came from.
        no_effect: one line for each setting that was accepted and does nothing.
    """

    config: OmniDiffusionConfig
    default_sampling_params: SamplingDefaults
    streaming_output: bool
    step_execution: bool
    engine_backend: str
    origins: tuple[EffectiveValue, ...]
    no_effect: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Host:
    platform: str
    visible_devices: int | None
    executor: str
    source: str


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
    host = _Host(platform, visible_devices, executor, source)
    file = None if deploy_config is None else load_deploy_file(deploy_config)
    general, per_stage = _split_overrides(overrides or {})
    merged = _merge(
        file,
        canonical_stage(general, where=host.source, flat_wins=True, warn=False),
        _stage_layers(stage_overrides, per_stage),
        host,
    )
    stage = parse_section(EngineArguments, merged.values, where="resolved configuration")
    return _finish(stage, merged, model, file, host)


def _finish(
    stage: EngineArguments, merged: Merged, model: str, file: DeployFile | None, host: _Host
) -> ResolvedDeployment:
    device = stage.device or host.platform
    if device == "cpu" and stage.device is None and stage.devices is not None:
        refuse_missing_devices(stage.devices)
    around = Surroundings(model=find_checkpoint(model), device=device, executor=host.executor)
    check_model_index(around.model)
    config = build_config(stage, around)
    sampling = build_sampling(stage.default_sampling_params, config)
    visible = host.visible_devices
    if device != "cpu":
        visible = visible_device_count(device, config.devices) if visible is None else visible
        check_device_count(
            ranks=config.parallel.world_size, visible=visible, devices=config.devices
        )
    config.parallel.check_heads(attention_heads(around.model))
    return ResolvedDeployment(
        config=config,
        default_sampling_params=sampling,
        streaming_output=bool(stage.streaming_output),
        step_execution=bool(stage.step_execution),
        engine_backend=engine_name(stage.engine_backend),
        origins=effective_values(stage, config, merged.origins),
        no_effect=(
            *(() if file is None else no_effect_notes(file.top)),
            *no_effect_notes(stage),
            *_platform_notes(stage, device),
            *_hidden_notes(merged),
        ),
    )


def _platform_notes(stage: StageSection, device: str) -> list[str]:
    notes = []
    if device == "cpu" and stage.devices is not None:
        notes.append(f"devices={stage.devices!r} has no effect: the CPU is one device")
    if device != "cuda" and stage.enforce_eager is False:
        notes.append("enforce_eager=False has no effect: blocks are compiled on CUDA only")
    return notes


def _hidden_notes(merged: Merged) -> list[str]:
    return [
        f"{key} of {origin} has no effect: the stage itself sets it"
        for key, origin, by in merged.hidden
        if ", platforms." in origin and by == origin.partition(", platforms.")[0]
    ]


def _merge(
    file: DeployFile | None, general: Values, stage_layers: list[Layer], host: _Host
) -> Merged:
    # Validated layer by layer, so that a message names the place where the mistake stands.
    parse_section(EngineArguments, general, where=host.source, extra_keys=OTHER_SPELLINGS)
    for layer in stage_layers:
        parse_section(StageSection, layer.values, where=layer.origin, extra_keys=OTHER_SPELLINGS)
    above = [Layer(host.source, general), *stage_layers]
    if file is None:
        return merge_layers(above)
    stage = _file_layer(file.stage, f"deploy file {file.path}", "stage 0")
    top = {key: value for key, value in dict(file.top).items() if key in _TOP_KEYS}
    top_layer = _file_layer(top, stage.origin, "top level")
    device = merge_layers([stage, *above]).values.get("device") or host.platform
    platform = _platform_layers(file, str(device))
    return merge_layers([*platform, top_layer, stage, *above])


def _platform_layers(file: DeployFile, device: str) -> list[Layer]:
    """The layer of this platform; the sections of others are checked all the same."""
    layers = {
        name: _file_layer(stage, f"deploy file {file.path}, platforms.{name}", "stage 0")
        for name, stage in file.platform_stages.items()
    }
    for name, layer in layers.items():
        if "device" in layer.values:
            raise ConfigError(f"{file.path}: platforms.{name} cannot set device")
    return [layers[device]] if device in layers else []


def _file_layer(raw: Mapping[str, object], origin: str, part: str) -> Layer:
    where = f"{origin}: {part}"
    values = canonical_stage(raw, where=where, flat_wins=False, warn=True)
    parse_section(StageSection, values, where=where, extra_keys=OTHER_SPELLINGS)
    values.pop("stage_id", None)
    return Layer(origin, values)


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


def _stage_layers(
    stage_overrides: Mapping[str, object] | str | None, per_stage: Values
) -> list[Layer]:
    values = [] if stage_overrides is None else [stage_zero(stage_overrides, "stage_overrides")]
    return [
        Layer(STAGE_ORIGIN, canonical_stage(raw, where=STAGE_ORIGIN, flat_wins=True, warn=True))
        for raw in [*values, per_stage]
        if raw
    ]


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
