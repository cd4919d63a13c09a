"""Pictures given as numpy arrays or torch tensors; torch itself is never imported here."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
from jaxtyping import Float32, Shaped

from vllm_omni.diffusion.messages import SourceImage
from vllm_omni.errors import InvalidRequestError

if TYPE_CHECKING:
    from torch import Tensor

_BYTE = 255


def source_from_array(
    source: object, *, check_pixels: Callable[[int, int], None], field: str
) -> SourceImage | None:
    """Normalise an array [H, W, 3] or a tensor [3, H, W], either with a leading 1.

    uint8 samples are kept. Others may be in [0, 255], [0, 1] or [-1, 1]: a largest sample above 1
    means the first; without a negative sample the range is mapped by 2x - 1, so a picture in
    [-1, 1] that holds none is taken for [0, 1].

    Args:
        check_pixels: called with width and height before anything is copied.

    Returns:
        The picture, or ``None`` where ``source`` is neither array nor tensor.

    Raises:
        InvalidRequestError: for another shape, type or range.
    """
    if isinstance(source, np.ndarray):
        height, width, channels = _one_image(source.shape, "H, W, 3", field)
        _check_channels(channels, source.shape, "H, W, 3", field)
        check_pixels(width, height)
        samples = source
    elif _is_tensor(source):
        channels, height, width = _one_image(source.shape, "3, H, W", field)
        _check_channels(channels, source.shape, "3, H, W", field)
        check_pixels(width, height)
        samples = _on_host(source).reshape(channels, height, width).transpose(1, 2, 0)
    else:
        return None
    samples = samples.reshape(height, width, channels)
    if samples.dtype == np.uint8:
        return SourceImage(rgb=np.array(samples, order="C"))
    return SourceImage(signed=_signed(samples, field))


def _is_tensor(source: object) -> "TypeGuard[Tensor]":
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(source, torch.Tensor)


def _one_image(shape: Sequence[int], needed: str, field: str) -> tuple[int, int, int]:
    sizes = tuple(shape[1:] if len(shape) == 4 and shape[0] == 1 else shape)
    if len(sizes) != 3:
        raise _wrong_shape(shape, needed, field)
    return sizes


def _check_channels(channels: int, shape: Sequence[int], needed: str, field: str) -> None:
    if channels != 3:
        raise _wrong_shape(shape, needed, field)


def _wrong_shape(shape: Sequence[int], needed: str, field: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"needs shape [{needed}] or [1, {needed}], got {list(shape)}", field=field
    )


def _on_host(tensor: "Tensor") -> Shaped[np.ndarray, "..."]:
    """Samples as numpy; half-width types, which numpy may not know, become float32."""
    host = tensor.detach().cpu()
    if host.is_floating_point() and host.element_size() < 4:
        host = host.float()
    return host.numpy()


def _signed(
    samples: Shaped[np.ndarray, "height width 3"], field: str
) -> Float32[np.ndarray, "height width 3"]:
    if samples.dtype.kind not in "fiu":
        raise InvalidRequestError(f"needs numbers, got type {samples.dtype}", field=field)
    values = np.array(samples, dtype=np.float32, order="C")
    if not np.isfinite(values).all():
        raise InvalidRequestError("holds NaN or infinity", field=field)
    low, high = float(values.min()), float(values.max())
    if low < -1.0 or high > _BYTE or (low < 0.0 and high > 1.0):
        raise InvalidRequestError(
            f"needs samples in [0, 255], [0, 1] or [-1, 1], got [{low:g}, {high:g}]", field=field
        )
    if high > 1.0:
        values /= _BYTE
    if low >= 0.0:
        values = values * np.float32(2.0) - np.float32(1.0)
    return values
