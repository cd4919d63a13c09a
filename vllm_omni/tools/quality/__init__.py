"""Picture quality of a toy world as numbers: ``python -m vllm_omni.tools.quality MODEL``."""
