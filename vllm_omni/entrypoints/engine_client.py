"""An engine with its deployment: what the Python classes and the server have in common."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from vllm_omni.config.resolve import ResolvedDeployment
from vllm_omni.diffusion.data import SamplingDefaults
from vllm_omni.diffusion.executor import create_executor
from vllm_omni.diffusion.messages import OutputKind, SessionRequest
from vllm_omni.diffusion.models.lingbot_world.request import RequestPolicy, parse_request
from vllm_omni.engine.engine import Engine
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.supervisor import WorkerSupervisor
from vllm_omni.inputs.data import OmniDiffusionSamplingParams


@dataclass(frozen=True, slots=True)
class EngineClient:
    """A deployment, its engine and the one way to turn input into a request."""

    deployment: ResolvedDeployment
    engine: Engine

    @classmethod
    def create(
        cls, deployment: ResolvedDeployment, *, model_name: str, warm_up: bool
    ) -> EngineClient:
        """Make the engine; nothing is started or loaded.

        Args:
            model_name: label of the metrics.
            warm_up: whether to warm up at the configured size before the engine is ready.
        """
        config = deployment.config
        supervisor = WorkerSupervisor(
            lambda: create_executor(config), warm_up=config.geometry if warm_up else None
        )
        metrics = EngineMetrics(model_name)
        return cls(deployment, Engine(supervisor, metrics, max_queued=config.max_queued))

    def parse(
        self, prompt: object, params: OmniDiffusionSamplingParams, *, unbounded: bool = False
    ) -> SessionRequest:
        """Validate a request. Decodes the picture, so not for an event loop.

        Raises:
            InvalidRequestError: naming the field, what was got and what is needed.
        """
        streaming = self.deployment.streaming_output
        policy = RequestPolicy.of(
            self.deployment.config,
            allow_live_camera=streaming or self.deployment.step_execution,
            array_output=OutputKind.UINT8 if streaming else OutputKind.FLOAT,
        )
        filled = with_defaults(params, self.deployment.default_sampling_params)
        return parse_request(prompt, filled, policy, unbounded=unbounded)


_UNTOUCHED = {
    field.name: field.default
    for field in dataclasses.fields(OmniDiffusionSamplingParams)
    if field.default is not dataclasses.MISSING
}


def with_defaults(
    params: OmniDiffusionSamplingParams, defaults: SamplingDefaults
) -> OmniDiffusionSamplingParams:
    """Fill what a request leaves at its default from the deployment's defaults.

    ``extra_args`` are merged key by key.
    """
    asked = _values(params)
    fill = {
        name: value
        for name, value in _values(defaults).items()
        if name in _UNTOUCHED and value is not None and asked[name] == _UNTOUCHED[name]
    }
    extra_args = {**defaults.extra_args, **params.extra_args}
    return dataclasses.replace(params, **fill, extra_args=extra_args)


def _values(source: OmniDiffusionSamplingParams | SamplingDefaults) -> dict[str, Any]:
    """Field values by name, not copied."""
    return {field.name: source.__getattribute__(field.name) for field in dataclasses.fields(source)}
