"""Settings that users of vLLM look for first, and what stands for them here."""

_MODEL = "model_config"
_KV = f"{_MODEL}.ar_diffusion_kv_config"
_SAMPLING = "default_sampling_params"
INSTEAD = {
    "gpu_memory_utilization": f"{_KV}.gpu_memory_fraction",
    "kv_cache_memory_bytes": f"{_KV}.gpu_memory_fraction",
    "block_size": f"{_KV}.page_tokens",
    "sliding_window": f"{_KV}.window_chunks",
    "sequence_parallel_size": "ulysses_degree",
    "sp": "ulysses_degree",
    "tp": "tensor_parallel_size",
    "load_format": "diffusion_load_format",
    "attention_backend": "diffusion_attention_backend",
    "attention_config": "diffusion_attention_config",
    "quantization": "diffusion_quantization_config",
    "quantization_config": "diffusion_quantization_config",
    "streaming_output": "diffusion_streaming_output",
    "compilation_config": "enforce_eager",
    "cuda_graph_sizes": "enforce_eager",
    "seed": f"{_SAMPLING}.seed",
    "num_frames": f"{_SAMPLING}.num_frames",
    "fps": f"{_SAMPLING}.fps",
    "height": f"{_MODEL}.ar_diffusion_height",
    "width": f"{_MODEL}.ar_diffusion_width",
    "override_generation_config": _SAMPLING,
}
"""vLLM's name -> a dotted key of the deploy file, or a key that is also a flag."""
UNUSED = frozenset({
    "async_scheduling", "chat_template", "cpu_offload_gb", "disable_log_requests",
    "disable_sliding_window", "download_dir", "enable_auto_tool_choice", "enable_chunked_prefill",
    "enable_lora", "enable_prefix_caching", "generation_config", "hf_config_path", "hf_overrides",
    "hf_token", "kv_cache_dtype", "kv_transfer_config", "limit_mm_per_prompt", "lora_modules",
    "max_cpu_loras", "max_lora_rank", "max_loras", "max_model_len", "max_num_batched_tokens",
    "max_seq_len", "max_seq_len_to_capture", "mm_processor_kwargs", "num_gpu_blocks_override",
    "num_lookahead_slots", "num_speculative_tokens", "reasoning_parser", "revision", "runner",
    "scheduling_policy", "skip_tokenizer_init", "speculative_config", "speculative_model",
    "swap_space", "task", "tokenizer", "tokenizer_mode", "tokenizer_revision", "tool_call_parser",
})  # fmt: skip
"""Names of vLLM's for what this model does not have."""


def hint(name: str) -> str | None:
    """What to say of a keyword argument that is a name of vLLM's, in a few words."""
    if name in INSTEAD:
        return f"use {INSTEAD[name]}"
    return "not used by this model" if name in UNUSED else None
