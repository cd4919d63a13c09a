"""The flags of ``vllm-omni serve``: one table for the parser, the reference page and the tests."""

from vllm_omni.config.server import LOG_LEVELS
from vllm_omni.diffusion.data import ATTENTION_BACKENDS, DEVICES, LINEAR_BACKENDS
from vllm_omni.entrypoints.cli.flag_parser import Flag

_MODEL, _PARALLEL, _RUN = "model and configuration", "parallelism", "execution"
_LOAD, _PROCESS, _SERVER = "loading and memory", "processes", "server"
_ONE_GROUP = "one worker group on this machine serves"


def _engine(
    names: str,
    kind: str,
    key: str,
    group: str,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    default: str = "",
) -> Flag:
    return Flag(tuple(names.split()), kind, f"engine.{key}", group, text, choices, default)


def _server(
    names: str, kind: str, key: str, text: str, *, choices: tuple[str, ...] = (), default: str = ""
) -> Flag:
    return Flag(tuple(names.split()), kind, f"server.{key}", _SERVER, text, choices, default)


def _refused(
    name: str, kind: str, text: str, why: str, *, neutral: tuple[object, ...] = ()
) -> Flag:
    key = name.lstrip("-").replace("-", "_")
    return Flag(
        (name,), kind, f"refuse.{key}", _PROCESS, text, refused=why, neutral=neutral
    )  # fmt: skip


_MODEL_FLAGS = (
    Flag(("--model",), "str", "serve.model", _MODEL,
         "checkpoint directory or hub id; the same as MODEL"),
    Flag(("--omni",), "switch", "serve.omni", _MODEL, "choose this server where vLLM is installed"),
    Flag(("--deploy-config",), "str", "serve.deploy_config", _MODEL,
         "deploy file; a bare name is also looked up among the packaged ones"),
    Flag(("--stage-overrides",), "json", "serve.stage_overrides", _MODEL,
         'per-stage values over everything else: {"0": {"KEY": VALUE}}'),
    _engine("--strategy-config", "str", "strategy_config", _MODEL, "parallel strategy file"),
    _engine("--default-sampling-params", "json", "default_sampling_params", _MODEL,
            'defaults of requests, over those of the file: {"0": {"KEY": VALUE}}'),
    _engine("--model-class-name", "str", "model_class_name", _MODEL, "class of the pipeline"),
    _engine("--trust-remote-code", "bool", "trust_remote_code", _MODEL, "run a checkpoint's code"),
    _engine("--dtype", "str", "dtype", _MODEL, "auto, bfloat16, float16 or float32",
            default="auto: bfloat16, float32 on CPU"),
    _engine("--flow-shift", "float", "flow_shift", _MODEL,
            "flow shift of the model; a request may override it", default="the checkpoint's"),
)  # fmt: skip

_PARALLEL_FLAGS = (
    _engine("--tensor-parallel-size -tp", "int", "tensor_parallel_size", _PARALLEL,
            "ranks that share each linear", default="1"),
    _engine("--usp --ulysses-degree", "int", "ulysses_degree", _PARALLEL,
            "ranks that share the tokens of each latent frame", default="1"),
    _engine("--ulysses-mode", "str", "ulysses_mode", _PARALLEL, "only strict",
            choices=("strict", "advanced_uaa"), default="strict"),
    _engine("--ulysses-a2a-permute", "bool", "ulysses_a2a_permute", _PARALLEL, "only off",
            default="off"),
    _engine("--ring --ring-degree", "int", "ring_degree", _PARALLEL, "only 1", default="1"),
    _engine("--allgather-degree", "int", "allgather_degree", _PARALLEL, "only 1", default="1"),
    _engine("--cfg-parallel-size", "int", "cfg_parallel_size", _PARALLEL, "only 1", default="1"),
    _engine("--vae-patch-parallel-size", "int", "vae_patch_parallel_size", _PARALLEL, "only 1",
            default="1"),
    _engine("--pipeline-parallel-size -pp", "int", "pipeline_parallel_size", _PARALLEL, "only 1",
            default="1"),
    _engine("--data-parallel-size -dp", "int", "data_parallel_size", _PARALLEL, "only 1",
            default="1"),
    _engine("--data-parallel-size-local", "int", "data_parallel_size_local", _PARALLEL, "only 1"),
    _engine("--data-parallel-address", "str", "data_parallel_address", _PARALLEL,
            "head of the replicas"),
    _engine("--data-parallel-rpc-port", "int", "data_parallel_rpc_port", _PARALLEL,
            "port of the replicas"),
    _engine("--data-parallel-start-rank", "int", "data_parallel_start_rank", _PARALLEL,
            "first replica here"),
    _engine("--data-parallel-backend", "str", "data_parallel_backend", _PARALLEL,
            "launcher of the replicas"),
    _engine("--enable-expert-parallel", "switch", "enable_expert_parallel", _PARALLEL,
            "only off"),
    _engine("--use-hsdp", "switch", "use_hsdp", _PARALLEL, "only off"),
    _engine("--hsdp-shard-size", "int", "hsdp_shard_size", _PARALLEL, "shards of HSDP"),
    _engine("--hsdp-replicate-size", "int", "hsdp_replicate_size", _PARALLEL, "replicas of HSDP"),
    _engine("--text-encoder-tp-size", "int", "text_encoder_tp_size", _PARALLEL,
            "ranks that share the text encoder"),
    _engine("--vae-parallel-mode", "str", "vae_parallel_mode", _PARALLEL, "split of the VAE",
            choices=("tile", "spatial_shard_height", "spatial_shard_width"), default="tile"),
    _engine("--num-gpus", "int", "num_gpus", _PARALLEL, "must equal the number of ranks"),
)  # fmt: skip

_RUN_FLAGS = (
    _engine("--device", "str", "device", _RUN, "platform of the ranks", choices=DEVICES,
            default="found by its device nodes"),
    _engine("--enforce-eager", "bool", "enforce_eager", _RUN, "do not compile",
            default="compile on CUDA"),
    _engine("--step-execution", "bool", "step_execution", _RUN, "control between chunks"),
    _engine("--diffusion-streaming-output", "bool", "diffusion_streaming_output", _RUN,
            "one output per chunk"),
    _engine("--max-num-seqs", "int", "max_num_seqs", _RUN, "sessions open at once", default="1"),
    _engine("--max-queued", "int", "max_queued", _RUN, "sessions that may wait for a place",
            default="16"),
    _engine("--diffusion-attention-backend", "str", "diffusion_attention_backend", _RUN,
            f"{', '.join(ATTENTION_BACKENDS)}", default="auto"),
    _engine("--diffusion-attention-config -dac", "json", "diffusion_attention_config", _RUN,
            'the same as JSON: {"backend": NAME}'),
    _engine("--linear-backend", "str", "linear_backend", _RUN, "implementation of the linears",
            choices=LINEAR_BACKENDS, default="native"),
    _engine("--diffusion-quantization-config", "json", "quantization_config", _RUN,
            'quantisation of vLLM\'s linears: {"method": "fp8"}'),
    _engine("--diffusion-compile-granularity", "str", "diffusion_compile_granularity", _RUN,
            "what is compiled in one piece", choices=("regional", "full")),
    _engine("--diffusion-compile-dynamic", "bool", "diffusion_compile_dynamic", _RUN,
            "compile for varying shapes"),
    _engine("--cache-backend", "str", "cache_backend", _RUN, "reuse between steps"),
    _engine("--cache-config", "json", "cache_config", _RUN, "options of the reuse"),
    _engine("--vae-fast-path", "str", "vae_fast_path", _RUN, "memory layout of the VAE",
            choices=("off", "lossless", "channels_last"), default="lossless"),
    _engine("--vae-use-tiling", "switch", "vae_use_tiling", _RUN, "decode in tiles"),
    _engine("--vae-use-slicing", "switch", "vae_use_slicing", _RUN, "decode one video at a time"),
    _engine("--enable-diffusion-pipeline-profiler", "switch",
            "enable_diffusion_pipeline_profiler", _RUN, "time the parts of a chunk"),
    _engine("--enable-ar-profiler", "switch", "enable_ar_profiler", _RUN, "time the chunks"),
    _engine("--enable-orch-monitor", "switch", "enable_orch_monitor", _RUN, "watch the engine"),
    _engine("--profiler-config", "json", "profiler_config", _RUN, "profiler endpoints"),
)  # fmt: skip

_LOAD_FLAGS = (
    _engine("--diffusion-load-format", "str", "diffusion_load_format", _LOAD,
            "source of the weights", choices=("default", "custom_pipeline", "dummy", "diffusers"),
            default="default"),
    _engine("--num-weight-load-threads", "int", "num_weight_load_threads", _LOAD,
            "threads that read weights"),
    _engine("--disable-multithread-weight-load", "switch", "disable_multithread_weight_load",
            _LOAD, "read weights in one thread"),
    _engine("--enable-broadcast-weight-load", "switch", "enable_broadcast_weight_load", _LOAD,
            "one rank reads, the others receive"),
    _engine("--enable-cpu-offload", "switch", "enable_cpu_offload", _LOAD, "only off"),
    _engine("--enable-layerwise-offload", "switch", "enable_layerwise_offload", _LOAD, "only off"),
    _engine("--enable-distributed-layerwise-offload", "switch",
            "enable_distributed_layerwise_offload", _LOAD, "only off"),
    _engine("--diffusion-offload-config", "json", "diffusion_offload_config", _LOAD, "only {}"),
    _engine("--lora-backend", "str", "lora_backend", _LOAD, "adapters"),
    _engine("--enable-sleep-mode", "switch", "enable_sleep_mode", _LOAD, "sleep endpoints"),
)  # fmt: skip

_PROCESS_FLAGS = (
    _engine("--stage-init-timeout", "float", "stage_init_timeout", _PROCESS,
            "seconds for a worker to start", default="300"),
    _engine("--init-timeout", "float", "init_timeout", _PROCESS,
            "seconds for the engine to start", default="600"),
    _engine("--shm-threshold-bytes", "int", "shm_threshold_bytes", _PROCESS,
            "size from which shared memory is used"),
    _engine("--worker-backend", "str", "worker_backend", _PROCESS, "only multi_process",
            default="multi_process"),
    _engine("--ray-address", "str", "ray_address", _PROCESS, "cluster of the workers"),
    _engine("--omni-dp-size-local", "int", "omni_dp_size_local", _PROCESS, "replicas, only 1"),
    _engine("--omni-lb-policy", "str", "omni_lb_policy", _PROCESS, "choice among replicas"),
    _engine("--omni-heartbeat-timeout", "float", "omni_heartbeat_timeout", _PROCESS,
            "seconds until a replica counts as dead"),
    _refused("--api-server-count", "int", "API processes, only 1",
             "sessions live in one API process", neutral=(1,)),
    _refused("--stage-id", "int", "run one stage of several", _ONE_GROUP),
    _refused("--headless", "switch", "run without an API process", _ONE_GROUP),
    _refused("--omni-master-address", "str", "head of several machines", _ONE_GROUP),
    _refused("--omni-master-port", "int", "port of the head", _ONE_GROUP),
    _refused("--omni-replica-address", "str", "address of a replica", _ONE_GROUP),
)  # fmt: skip

_SERVER_FLAGS = (
    _server("--host", "str", "host", "address to listen on", default="all IPv4 addresses"),
    _server("--port", "int", "port", "port to listen on; 0 lets the system choose",
            default="8000"),
    _server("--served-model-name", "list", "served_model_names",
            "names that a request may give as its model", default="MODEL as given"),
    _server("--api-key", "list", "api_keys",
            "requests must carry one of these as bearer token",
            default="that of VLLM_API_KEY; none needed where it is not set"),
    _server("--allowed-origins", "list", "allowed_origins",
            "origins of web pages that may talk to the server besides its own (CORS and "
            "sockets), as words or as one JSON list; * for all"),
    _server("--allowed-media-domains", "list", "allowed_media_domains",
            "the only hosts that pictures are fetched from, private ones included",
            default="every host with public addresses"),
    _server("--no-web-page", "off", "web_page", "serve no page at /"),
    _server("--max-generated-image-size", "int", "max_pixels",
            "largest width x height of a request, in pixels", default="7680 x 4320"),
    _server("--shutdown-timeout", "float", "shutdown_timeout_s",
            "seconds for an orderly end after SIGTERM", default="30"),
    _engine("--log-stats", "switch", "log_stats", _SERVER, "log figures of the engine"),
    _engine("--disable-log-stats", "off", "log_stats", _SERVER, "the opposite of --log-stats"),
    _server("--log-file", "str", "log_file", "write the log to this file, too"),
    _server("--enable-log-requests", "switch", "log_requests", "log each request"),
    _server("--uvicorn-log-level", "str", "log_level", "what the HTTP server logs",
            choices=LOG_LEVELS, default="info"),
    _server("--disable-uvicorn-access-log", "off", "access_log", "log no HTTP requests"),
    _server("--ssl-keyfile", "str", "ssl_keyfile", "private key"),
    _server("--ssl-certfile", "str", "ssl_certfile", "certificate"),
    _server("--ssl-ca-certs", "str", "ssl_ca_certs", "authorities for certificates of clients"),
    _server("--ssl-cert-reqs", "int", "ssl_cert_reqs",
            "certificates of clients: 0 none, 1 optional, 2 required", default="0"),
)  # fmt: skip

FLAGS = (
    *_MODEL_FLAGS, *_PARALLEL_FLAGS, *_RUN_FLAGS, *_LOAD_FLAGS, *_PROCESS_FLAGS, *_SERVER_FLAGS,
)  # fmt: skip
