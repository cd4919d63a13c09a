"""One rank of a worker group and the process that it runs in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_omni.diffusion.data import OmniDiffusionConfig

if TYPE_CHECKING:
    from vllm_omni.diffusion.worker.worker import Worker


def worker_class(config: OmniDiffusionConfig) -> type[Worker]:
    """Return the class of the workers; only one that makes video loads the encoder."""
    if config.encode_on == "worker":
        from vllm_omni.diffusion.worker.encoding import EncodingWorker

        return EncodingWorker
    from vllm_omni.diffusion.worker.worker import Worker

    return Worker
