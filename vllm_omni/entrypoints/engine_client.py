"""An engine with its deployment: what the Python classes and the server have in common."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import PlatformCollector, ProcessCollector

from vllm_omni.config.resolve import ResolvedDeployment
from vllm_omni.diffusion.data import SamplingDefaults
from vllm_omni.diffusion.executor import create_executor
from vllm_omni.diffusion.messages import OutputKind, SessionRequest
from vllm_omni.diffusion.models.lingbot_world.request import RequestPolicy, parse_request
from vllm_omni.engine.engine import Engine
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.engine.supervisor import WorkerSupervisor
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class EngineClient:
    """A deployment, its engine and the one way to turn input into a request."""

    deployment: ResolvedDeployment
    engine: Engine

    @classmethod
    def create(
        cls, deployment: ResolvedDeployment, *, model_name: str, warm_up: bool
    ) -> EngineClient:
        """Make the engine; nothing is started or loaded. Its metrics hold this process's, too.

        Args:
            model_name: label of the metrics.
            warm_up: whether to warm up at the configured size before the engine is ready.
        """
        config = deployment.config
        supervisor = WorkerSupervisor(
            lambda: create_executor(config), warm_up=config.geometry if warm_up else None
        )
        metrics = EngineMetrics(model_name)
        ProcessCollector(registry=metrics.registry)
        PlatformCollector(registry=metrics.registry)
        return cls(deployment, Engine(supervisor, metrics, max_queued=config.max_queued))

    def parse(
        self, prompt: object, params: OmniDiffusionSamplingParams, *, unbounded: bool | None = None
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


def with_defaults(
    params: OmniDiffusionSamplingParams, defaults: SamplingDefaults
) -> OmniDiffusionSamplingParams:
    """Fill what a request leaves at its default from the deployment's defaults.

    ``extra_args`` are merged key by key.
    """
    return dataclasses.replace(
        params,
        num_inference_steps=_filled(params.num_inference_steps, defaults.num_inference_steps),
        max_sequence_length=_filled(params.max_sequence_length, defaults.max_sequence_length),
        height=_filled(params.height, defaults.height),
        width=_filled(params.width, defaults.width),
        num_frames=_filled(params.num_frames, defaults.num_frames, untouched=1),
        seed=_filled(params.seed, defaults.seed),
        fps=_filled(params.fps, defaults.fps),
        output_type=_filled(params.output_type, defaults.output_type),
        num_outputs_per_prompt=_filled(
            params.num_outputs_per_prompt, defaults.num_outputs_per_prompt, untouched=1
        ),
        generator_device=_filled(params.generator_device, defaults.generator_device),
        extra_args={**defaults.extra_args, **params.extra_args},
    )


def _filled(asked: Value, default: Value | None, *, untouched: object = None) -> Value:
    return default if asked == untouched and default is not None else asked
