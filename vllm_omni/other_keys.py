"""Keys that are known and set nothing: refused ones, ones without effect, ones of one value.

Deploy files and command lines written for other engines of this family use them. A refused key
would change what comes out or how it is run, so only its harmless values pass. A key without effect
changes no result and is reported once at start-up, unless its value says what happens anyway.
Adding one takes one line.
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator

from vllm_omni.setting import PARALLEL, Positive, Seconds, Setting, Status, names
from vllm_omni.wording import refuse

_MODEL = "model_config."
_KV = "model_config.ar_diffusion_kv_config."
_SAMPLING = "default_sampling_params."

_ON_DEVICE = "weights stay on their device"
_REUSE = "reusing activations between steps changes the video"
_DISTILLED = "the model is distilled without guidance"
_ONE_GROUP = "one worker group on this machine serves"
_NO_ADAPTERS = "adapters are not loaded"
_READING = "how weights are read does not change them"
_TIMINGS = "the timings of every chunk are always reported"
_NO_HSDP = "weights are not sharded that way"
_DEGREES = "this model shares a world by tensor_parallel_size and ulysses_degree alone"
_NO_REMOTE_CODE = "no code of a checkpoint is ever run"
_ASKED_FOR = "the model is the one that was asked for"
_ONE_STAGE = "there is one stage"


def _exact_decoder(value: object) -> object:
    if value is False:  # YAML reads a bare `off` as false
        return "off"
    if value == "fused":
        raise refuse("must be off or exact, since fused changes the pixels")
    if value not in ("off", "exact"):
        raise refuse("must be off or exact")
    return value


def _key(
    status: Status, key: str, kind: object, why: str, passes: Sequence[object] = (), flags: str = ""
) -> Setting:
    """Declare a key by its kind of value and why it sets nothing.

    Args:
        passes: values that a refused key takes, and that a key without effect does not report.
        flags: spellings on the command line; the word ``own`` stands for the key with dashes.
    """
    own = f"--{key.rpartition('.')[2].replace('_', '-')}"
    spelled = tuple(own if word == "own" else word for word in flags.split())
    return Setting(key, kind, why, flags=spelled, status=status, passes=tuple(passes))


refused = partial(_key, Status.REFUSED)
no_effect = partial(_key, Status.NO_EFFECT)

STAGE_KEYS = (
    refused("stage_id", int, "this pipeline has one stage, 0", [0]),
    refused("cache_backend", str, _REUSE, ["none", ""], flags="own"),
    refused("cache_config", dict[str, object], _REUSE, [{}], flags="own"),
    refused("vae_use_tiling", bool, "blending tiles changes the pixels", [False], flags="own"),
    refused("enable_cpu_offload", bool, _ON_DEVICE, [False], flags="own"),
    refused("enable_layerwise_offload", bool, _ON_DEVICE, [False], flags="own"),
    refused("enable_distributed_layerwise_offload", bool, _ON_DEVICE, [False], flags="own"),
    refused("diffusion_offload_config", dict[str, object], _ON_DEVICE, [{}], flags="own"),
    refused("diffusion_compile_granularity", Literal["regional", "full"],
            "blocks are compiled one by one", ["regional"], flags="own"),
    refused("diffusion_load_format", Literal["default", "auto", "custom_pipeline", "dummy",
                                             "diffusers"],
            "weights come from the checkpoint (`vllm-omni tiny-checkpoint` writes a random one)",
            ["default", "auto"], flags="own"),
    refused("kv_cache_dtype", str, "it cannot be consumed by a diffusion stage"),
    refused("seed", int,
            "it cannot be consumed by a diffusion stage; use default_sampling_params.seed"),
    refused("use_v2_model_runner", bool, "this stage has no model runner choice", [False]),
    refused("static_lora_scale", float, _NO_ADAPTERS),
    refused("lora_path", str, _NO_ADAPTERS),
    refused("lora_backend", str, _NO_ADAPTERS, flags="own"),
    refused("strategy_config", str, "give the parallel degrees themselves", flags="own"),
    refused("data_parallel_rpc_port", int, _ONE_GROUP, flags="own"),
    refused("data_parallel_address", str, _ONE_GROUP, flags="own"),
    refused("data_parallel_start_rank", int, _ONE_GROUP, flags="own"),
    refused("data_parallel_backend", str, _ONE_GROUP, flags="own"),
    refused("data_parallel_size_local", int, _ONE_GROUP, [1], flags="own"),
    no_effect("omni_lb_policy",
              Annotated[str, names(("random", "round-robin", "least-queue-length"))],
              "the replica with the most free places takes the next session", flags="own"),
    no_effect("omni_heartbeat_timeout", Seconds, "workers are watched through their pipes",
              flags="own"),
    no_effect("shm_threshold_bytes", int, "pixels always travel by shared memory", flags="own"),
    no_effect("output_modalities", object, "the output is video", ["video", ["video"]]),
    no_effect("async_chunk", bool, _ONE_STAGE, [False]),
    no_effect("model", str, _ASKED_FOR),
    no_effect("model_arch", str, _ASKED_FOR),
    no_effect("trust_remote_code", bool, _NO_REMOTE_CODE, [False], flags="own"),
    no_effect("default_pooling_params", object, "nothing is pooled"),
    no_effect("subtalker_sampling_params", object, "there is no speech"),
    no_effect("vae_use_slicing", bool, "one video is decoded at a time", [False], flags="own"),
    no_effect("vae_fast_path", Literal["off", "lossless", "channels_last"],
              "the VAE picks the memory layout of its platform", ["lossless"], flags="own"),
    no_effect("diffusion_compile_dynamic", bool, "shapes are known when blocks are compiled",
              flags="own"),
    no_effect("num_weight_load_threads", int, _READING, flags="own"),
    no_effect("disable_multithread_weight_load", bool, _READING, [False], flags="own"),
    no_effect("enable_broadcast_weight_load", bool, _READING, [False], flags="own"),
    no_effect("enable_diffusion_pipeline_profiler", bool, _TIMINGS, [False], flags="own"),
    no_effect("enable_ar_profiler", bool, _TIMINGS, [False], flags="own"),
    no_effect("enable_orch_monitor", bool, "the metrics endpoint reports the engine", [False],
              flags="own"),
    no_effect("profiler_config", object, "there are no profiler endpoints", flags="own"),
    no_effect("enable_sleep_mode", bool, "there are no sleep endpoints", [False], flags="own"),
    no_effect("log_stats", bool, "figures are at /metrics", [False],
              flags="own --disable-log-stats"),
)  # fmt: skip

PARALLEL_KEYS = (
    refused(PARALLEL + "ring_degree", Positive, _DEGREES, [1], flags="--ring own"),
    refused(PARALLEL + "allgather_degree", Positive, _DEGREES, [1], flags="own"),
    refused(PARALLEL + "ulysses_mode", Literal["strict", "advanced_uaa"], _DEGREES, ["strict"],
            flags="own"),
    refused(PARALLEL + "ulysses_a2a_permute", bool, _DEGREES, [False], flags="own"),
    refused(PARALLEL + "cfg_parallel_size", Positive, _DEGREES, [1], flags="own"),
    refused(PARALLEL + "pipeline_parallel_size", Positive, _DEGREES, [1], flags="own -pp"),
    refused(PARALLEL + "data_parallel_size", Positive, _DEGREES, [1], flags="own -dp"),
    refused(PARALLEL + "vae_patch_parallel_size", Positive, _DEGREES, [1], flags="own"),
    refused(PARALLEL + "enable_expert_parallel", bool, _DEGREES, [False], flags="own"),
    refused(PARALLEL + "use_hsdp", bool, _DEGREES, [False], flags="own"),
    no_effect(PARALLEL + "vae_parallel_mode",
              Literal["tile", "spatial_shard_height", "spatial_shard_width"],
              "the model shards its VAE by model_config.lingbot_vae_spatial_sharding", ["tile"],
              flags="own"),
    no_effect(PARALLEL + "text_encoder_tp_size", Positive, "every rank runs the text encoder", [1],
              flags="own"),
    no_effect(PARALLEL + "hsdp_shard_size", int, _NO_HSDP, [-1], flags="own"),
    no_effect(PARALLEL + "hsdp_replicate_size", int, _NO_HSDP, [1], flags="own"),
    no_effect(PARALLEL + "mask_sp_padding", bool, "tokens are never padded", [False]),
)  # fmt: skip

MODEL_KEYS = (
    no_effect(_MODEL + "lingbot_vae_decode_fast_path",
              Annotated[object, AfterValidator(_exact_decoder)], "the decoder is exact", ["off"]),
    no_effect(_KV + "enable", bool, "the window is always on", [True]),
    no_effect(_KV + "warmup_cudagraph", bool, "warm-up always runs until the window has rolled",
              [False]),
    no_effect(_KV + "warmup_capture_reset", bool, "warm-up frees its session", [False]),
    no_effect(_KV + "chunk_size", int, "tokens per latent frame follow from the size"),
    no_effect(_KV + "reuse_history_staging", bool, "the window needs no staging", [False]),
    refused(_KV + "reset_at_boundary", bool, "it would forget the window between chunks", [False]),
    no_effect(_SAMPLING + "guidance_scale", float, _DISTILLED),
    no_effect(_SAMPLING + "guidance_scale_2", float, _DISTILLED),
    no_effect(_SAMPLING + "true_cfg_scale", float, _DISTILLED),
    no_effect(_SAMPLING + "boundary_ratio", float, "there is one transformer"),
    no_effect(_SAMPLING + "negative_prompt", str, _DISTILLED),
)  # fmt: skip

TOP_KEYS = (
    no_effect("async_chunk", bool, _ONE_STAGE, [False]),
    no_effect("session_mode", str, "each request is a session", ["turn"]),
    no_effect("model_runner", str, "there is one runner"),
    no_effect("active_stream_window", object, "the KV window is set in model_config"),
    no_effect("duplex_session", object, "each session takes input while it plays"),
    no_effect("connectors", object, _ONE_STAGE),
    no_effect("edges", object, _ONE_STAGE),
    no_effect("trust_remote_code", bool, _NO_REMOTE_CODE, [False]),
    no_effect("enable_prefix_caching", bool, "there are no shared prefixes", [False]),
    no_effect("enable_chunked_prefill", bool, "there is no prefill", [False]),
    no_effect("custom_voice_dir", str, "there is no speech"),
    refused("stage_args", object, "this schema was removed; list the stages under 'stages'"),
)  # fmt: skip
"""At the top level of a deploy file, beside the list of stages."""

FLAG_KEYS = (
    refused("api_server_count", int, "sessions live in one API process", [1], flags="own"),
    refused("stage_id", int, _ONE_GROUP, flags="own"),
    refused("headless", bool, _ONE_GROUP, flags="own"),
    refused("omni_master_address", str, _ONE_GROUP, flags="own"),
    refused("omni_master_port", int, _ONE_GROUP, flags="own"),
    refused("omni_replica_address", str, _ONE_GROUP, flags="own"),
    no_effect("enable_request_id_headers", bool, "every answer carries X-Request-Id", [True],
              flags="own"),
)  # fmt: skip
"""On the command line alone."""
