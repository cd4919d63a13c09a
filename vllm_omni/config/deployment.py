"""The top level of a deploy file, and the arguments that only a caller can give."""

from typing import Literal

from pydantic import Field, model_validator

from vllm_omni.config.deploy import PIPELINE, Degree, Positive, StageSection, Text
from vllm_omni.config.schema import Section, ignored, refused

PLATFORM_SECTIONS = ("cpu", "cuda", "npu", "rocm", "xpu", "musa")


class DeploySection(Section):
    """The top level of a deploy file."""

    pipeline: Literal["lingbot_world"] | None = Field(None, description=f"only {PIPELINE}")
    base_config: Text | None = Field(None, description="file to inherit from, relative to this one")
    distributed_executor_backend: Literal["mp", "uni", "inline"] | None = Field(
        None, description="see the stage key of this name, which wins"
    )
    dtype: str | None = Field(None, description="see the stage key of this name, which wins")
    quantization: object = Field(
        None, description="see the stage key quantization_config, which wins"
    )
    pipeline_parallel_size: Degree | None = Field(None, description="only 1")
    data_parallel_size: Degree | None = Field(None, description="only 1")
    stages: list[dict[str, object]] | None = Field(
        None, description="stages by stage_id; this pipeline has one, stage 0"
    )
    platforms: dict[str, object] | None = Field(
        None,
        description="platform name -> {stages: [...]}: values for keys that the stage leaves out",
    )
    async_chunk: bool | None = ignored("there is one stage", quiet=[False])
    session_mode: str | None = ignored("each request is a session", quiet=["turn"])
    model_runner: str | None = ignored("there is one runner")
    active_stream_window: object = ignored("the KV window is set in model_config")
    duplex_session: object = ignored("each session takes input while it plays")
    connectors: object = ignored("there is one stage")
    edges: object = ignored("there is one stage")
    trust_remote_code: bool | None = ignored("no code of a checkpoint is ever run", quiet=[False])
    enable_prefix_caching: bool | None = ignored("there are no shared prefixes", quiet=[False])
    enable_chunked_prefill: bool | None = ignored("there is no prefill", quiet=[False])
    custom_voice_dir: str | None = ignored("there is no speech")
    stage_args: object = refused(
        "this schema was removed; list the stages under 'stages'", neutral=[]
    )

    @model_validator(mode="after")
    def _known_platforms(self) -> "DeploySection":
        for name in self.platforms or {}:
            if name not in PLATFORM_SECTIONS:
                raise ValueError(
                    f"platforms: unknown platform {name!r}; known: {', '.join(PLATFORM_SECTIONS)}"
                )
        return self


class PlatformSection(Section):
    """One entry of ``platforms``."""

    stages: list[dict[str, object]] | None = Field(None, description="stages, by stage_id")


class EngineArguments(StageSection):
    """Keyword arguments and flags of an engine: the keys of a stage and a few more."""

    num_gpus: int | None = Field(None, ge=1, description="must equal the number of ranks")
    stage_init_timeout: Positive | None = Field(None, description="seconds for a worker to start")
    init_timeout: Positive | None = Field(None, description="seconds for the engine to start")
    log_stats: bool | None = Field(None, description="log figures of the engine now and then")
    strategy_config: object = refused("give the parallel degrees themselves", neutral=[])
    data_parallel_rpc_port: object = refused("there are no replicas", neutral=[])
    data_parallel_address: object = refused("there are no replicas", neutral=[])
    data_parallel_start_rank: object = refused("there are no replicas", neutral=[])
    data_parallel_backend: object = refused("there are no replicas", neutral=[])
    data_parallel_size_local: int | None = refused("there are no replicas", neutral=[1])
    worker_backend: str | None = refused("workers are processes", neutral=["multi_process", "mp"])
    ray_address: str | None = refused("workers are processes of this machine", neutral=[])
    omni_dp_size_local: int | None = refused("one worker group serves", neutral=[1])
    omni_lb_policy: Literal["random", "round-robin", "least-queue-length"] | None = ignored(
        "one worker group serves"
    )
    omni_heartbeat_timeout: Positive | None = ignored("workers are watched through their pipes")
    shm_threshold_bytes: int | None = ignored("pixels always travel by shared memory")
    output_modalities: object = ignored("the output is video", quiet=["video", ["video"]])
    async_chunk: bool | None = ignored("there is one stage", quiet=[False])
    enable_ar_profiler: bool | None = ignored(
        "the timings of every chunk are always reported", quiet=[False]
    )
    enable_orch_monitor: bool | None = ignored(
        "the metrics endpoint reports the engine", quiet=[False]
    )
    profiler_config: object = ignored("there are no profiler endpoints")
    enable_sleep_mode: bool | None = ignored("there are no sleep endpoints", quiet=[False])
