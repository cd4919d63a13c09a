"""The ``vllm-omni`` command and its sub-commands."""
