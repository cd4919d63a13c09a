"""Ways to run a worker group."""

from importlib import import_module

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.executor.base import Executor

_EXECUTORS = {
    "inline": ("vllm_omni.diffusion.executor.inline", "InlineExecutor"),
    "mp": ("vllm_omni.diffusion.executor.multiprocess", "MultiprocExecutor"),
}


def create_executor(config: OmniDiffusionConfig) -> Executor:
    """The executor that the configuration names, not started. Loads torch only for ``inline``."""
    module, name = _EXECUTORS[config.executor]
    return vars(import_module(module))[name](config)
