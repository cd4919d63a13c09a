"""Small tensors of the host to where the model is, without waiting for the device."""

import torch
from jaxtyping import Shaped
from torch import Tensor

_WITHOUT_QUEUE = {"cpu", "meta"}


def to_device(host: Shaped[Tensor, "*shape"], device: torch.device) -> Shaped[Tensor, "*shape"]:
    """Copy in the order of the device's queue; the host goes on at once.

    An ordinary copy waits until the queue has come to it. From pinned memory it does not, and the
    allocator of such memory holds a block until the copies out of it are done.

    Args:
        host: pageable; may be dropped or written to when this returns. No indices: on NPUs a
            kernel that ran before such a copy would fault.
    """
    if device.type in _WITHOUT_QUEUE or host.device.type != "cpu":
        return host.to(device)
    return host.contiguous().pin_memory().to(device, non_blocking=True)
