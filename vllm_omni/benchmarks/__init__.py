"""The benchmark of live worlds: ``vllm-omni bench``."""
