"""The top level of a deploy file, and the arguments that only a caller can give."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from vllm_omni.config.deploy import PIPELINE, Degree, Positive, Text
from vllm_omni.config.schema import Section, ignored, refused
from vllm_omni.config.stage import StageSection

PLATFORM_SECTIONS = ("cpu", "cuda", "npu", "rocm", "xpu", "musa")


class DeploySection(Section):
    """The top level of a deploy file."""

    pipeline: Literal["lingbot_world"] | None = Field(default=None, description=f"only {PIPELINE}")
    base_config: Text | None = Field(
        default=None, description="file to inherit from, relative to this one"
    )
    distributed_executor_backend: Literal["mp", "uni", "inline"] | None = Field(
        default=None, description="see the stage key of this name, which wins"
    )
    dtype: str | None = Field(
        default=None, description="see the stage key of this name, which wins"
    )
    quantization: object = Field(
        default=None, description="see the stage key quantization_config, which wins"
    )
    pipeline_parallel_size: Degree | None = Field(default=None, description="only 1")
    data_parallel_size: Degree | None = Field(default=None, description="only 1")
    stages: list[dict[str, object]] | None = Field(
        default=None, description="stages by stage_id; this pipeline has one, stage 0"
    )
    platforms: dict[str, object] | None = Field(
        default=None,
        description="platform name -> {stages: [...]}: values for keys that the stage leaves out",
    )
    async_chunk: Annotated[bool | None, ignored("there is one stage", quiet=[False])] = None
    session_mode: Annotated[str | None, ignored("each request is a session", quiet=["turn"])] = None
    model_runner: Annotated[str | None, ignored("there is one runner")] = None
    active_stream_window: Annotated[object, ignored("the KV window is set in model_config")] = None
    duplex_session: Annotated[object, ignored("each session takes input while it plays")] = None
    connectors: Annotated[object, ignored("there is one stage")] = None
    edges: Annotated[object, ignored("there is one stage")] = None
    trust_remote_code: Annotated[
        bool | None, ignored("no code of a checkpoint is ever run", quiet=[False])
    ] = None
    enable_prefix_caching: Annotated[
        bool | None, ignored("there are no shared prefixes", quiet=[False])
    ] = None
    enable_chunked_prefill: Annotated[
        bool | None, ignored("there is no prefill", quiet=[False])
    ] = None
    custom_voice_dir: Annotated[str | None, ignored("there is no speech")] = None
    stage_args: Annotated[
        object, refused("this schema was removed; list the stages under 'stages'", neutral=[])
    ] = None

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

    stages: list[dict[str, object]] | None = Field(default=None, description="stages, by stage_id")


class EngineArguments(StageSection):
    """Keyword arguments and flags of an engine: the keys of a stage and a few more."""

    num_gpus: int | None = Field(default=None, ge=1, description="must equal the number of ranks")
    stage_init_timeout: Positive | None = Field(
        default=None, description="seconds for a worker to start"
    )
    init_timeout: Positive | None = Field(
        default=None, description="seconds for the engine to start"
    )
    log_stats: Annotated[bool | None, ignored("figures are at /metrics", quiet=[False])] = None
    strategy_config: Annotated[
        object, refused("give the parallel degrees themselves", neutral=[])
    ] = None
    data_parallel_rpc_port: Annotated[object, refused("there are no replicas", neutral=[])] = None
    data_parallel_address: Annotated[object, refused("there are no replicas", neutral=[])] = None
    data_parallel_start_rank: Annotated[object, refused("there are no replicas", neutral=[])] = None
    data_parallel_backend: Annotated[object, refused("there are no replicas", neutral=[])] = None
    data_parallel_size_local: Annotated[
        int | None, refused("there are no replicas", neutral=[1])
    ] = None
    worker_backend: Annotated[
        str | None, refused("workers are processes", neutral=["multi_process", "mp"])
    ] = None
    ray_address: Annotated[
        str | None, refused("workers are processes of this machine", neutral=[])
    ] = None
    omni_dp_size_local: Annotated[int | None, refused("one worker group serves", neutral=[1])] = (
        None
    )
    omni_lb_policy: Annotated[
        Literal["random", "round-robin", "least-queue-length"] | None,
        ignored("one worker group serves"),
    ] = None
    omni_heartbeat_timeout: Annotated[
        Positive | None, ignored("workers are watched through their pipes")
    ] = None
    shm_threshold_bytes: Annotated[int | None, ignored("pixels always travel by shared memory")] = (
        None
    )
    output_modalities: Annotated[
        object, ignored("the output is video", quiet=["video", ["video"]])
    ] = None
    async_chunk: Annotated[bool | None, ignored("there is one stage", quiet=[False])] = None
    enable_ar_profiler: Annotated[
        bool | None, ignored("the timings of every chunk are always reported", quiet=[False])
    ] = None
    enable_orch_monitor: Annotated[
        bool | None, ignored("the metrics endpoint reports the engine", quiet=[False])
    ] = None
    profiler_config: Annotated[object, ignored("there are no profiler endpoints")] = None
    enable_sleep_mode: Annotated[
        bool | None, ignored("there are no sleep endpoints", quiet=[False])
    ] = None
