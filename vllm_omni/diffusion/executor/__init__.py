"""Ways to run a worker group."""

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.executor.base import Executor


def create_executor(config: OmniDiffusionConfig) -> Executor:
    """The executor that the configuration names, not started. Loads torch only for ``inline``."""
    if config.executor == "inline":
        from vllm_omni.diffusion.executor.inline import InlineExecutor

        return InlineExecutor(config)
    from vllm_omni.diffusion.executor.multiprocess import MultiprocExecutor

    return MultiprocExecutor(config)
