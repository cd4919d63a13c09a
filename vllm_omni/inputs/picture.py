"""The first picture of a world, from whatever a client gives, as one upright opaque array.

The same picture gives the same pixels as path, bytes, data URL and PIL image: EXIF orientation is
applied, transparency is composited over white, 16-bit samples are scaled to 8 bits, CMYK is
converted, embedded colour profiles are ignored. Sizes are checked before pixels are decoded. Torch
is never imported here, although its tensors are read.
"""

import base64
import binascii
import io
import os
import re
import struct
import sys
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
from jaxtyping import Float32, Num, Shaped, UInt8
from PIL import Image, ImageOps

from vllm_omni import envs
from vllm_omni.diffusion.messages import SourceImage
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.safe_files import open_regular_file

if TYPE_CHECKING:
    from torch import Tensor

MAX_SOURCE_PIXELS = 4096 * 4096
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
"""Decoders that client bytes may reach."""
BACKGROUND = (255, 255, 255, 255)
"""What shows through transparent pixels."""

_FIELD = "image"
_DATA_URL = re.compile(r"data:[^,;]*(?:;[^,;]*)*;base64,", re.IGNORECASE)
_SIXTEEN_BIT = ("I", "I;16", "I;16B", "I;16L", "I;16N")
_WHITE_16 = 65535
_BYTE = 255
# What Pillow's decoders raise for damaged files, beside its own subclasses of OSError.
_DECODE_ERRORS = (
    OSError, ValueError, SyntaxError, TypeError, LookupError, EOFError, OverflowError,
    RuntimeError, MemoryError, AttributeError, struct.error, zlib.error,
)  # fmt: skip


def load_image(source: object) -> SourceImage:
    """Decode and normalise a picture.

    Args:
        source: a path, encoded bytes, a base64 ``data:`` URL, a PIL image, a numpy array
            [H, W, 3] or a torch tensor [3, H, W]; arrays may have a leading 1.

    Raises:
        InvalidRequestError: without any path in its text.
    """
    match source:
        case str() if source[:5].lower() == "data:":
            return _from_bytes(_data_url_bytes(source))
        case str() if re.match(r"https?://", source, re.IGNORECASE):
            raise _refused("URLs are not fetched here; give the bytes of the picture")
        case str() | os.PathLike():
            with open_regular_file(os.fspath(source), field=_FIELD) as file:
                return _from_file(file)
        case bytes() | bytearray() | memoryview():
            return _from_bytes(bytes(source))
        case Image.Image():
            return _from_pillow(source)
        case list() | tuple():
            raise _refused(f"needs one picture, got a list of {len(source)}")
    from_array = _from_array(source)
    if from_array is None:
        raise _refused(
            "needs a path, bytes, data URL, PIL image, numpy array or torch tensor, got "
            f"{type(source).__name__}"
        )
    return from_array


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, field=_FIELD)


def _data_url_bytes(url: str) -> bytes:
    head = _DATA_URL.match(url)
    if head is None:
        raise _refused("a data URL needs the form data:image/...;base64,...")
    try:
        # In lines, as many tools write it; spaces and line breaks mean nothing in base64.
        text = url[head.end() :].encode("ascii").translate(None, b" \t\r\n\f\v")
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _refused("the data URL does not hold valid base64") from None


def _from_bytes(content: bytes) -> SourceImage:
    if not content:
        raise _refused("got an empty file")
    return _from_file(io.BytesIO(content))


def _from_file(file: io.BytesIO | io.BufferedReader) -> SourceImage:
    try:
        with Image.open(file, formats=FORMATS) as image:
            return _from_pillow(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        pixels = re.search(r"\d+", str(error))
        raise _too_many_pixels("?" if pixels is None else pixels[0]) from None
    except InvalidRequestError:
        raise
    except Image.UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise _refused(f"is damaged or of an unknown format; known are {known}") from None
    except _DECODE_ERRORS as error:
        raise _damaged(error) from None


def _from_pillow(image: Image.Image) -> SourceImage:
    _check_pixels(*image.size)
    try:
        _check_single_frame(image)
        image.load()
        return SourceImage(rgb=_opaque_rgb(ImageOps.exif_transpose(image)))
    except InvalidRequestError:
        raise
    except _DECODE_ERRORS as error:
        raise _damaged(error) from None


def _damaged(error: BaseException) -> InvalidRequestError:
    # The text of a system error can hold a path; that of a decoder cannot.
    is_system = isinstance(error, OSError) and error.errno is not None
    reason = type(error).__name__ if is_system else f"{error}"
    return _refused(f"cannot be decoded ({reason:.200})")


def _check_pixels(width: int, height: int) -> None:
    limit = min(MAX_SOURCE_PIXELS, envs.max_image_pixels() or MAX_SOURCE_PIXELS)
    if width < 1 or height < 1:
        raise _refused(f"needs at least one pixel, got {width}x{height}")
    if width * height > limit:
        raise _too_many_pixels(f"{width}x{height} = {width * height}", limit)


def _too_many_pixels(got: str, limit: int = MAX_SOURCE_PIXELS) -> InvalidRequestError:
    return _refused(f"needs at most {limit} pixels, got {got}; scale the picture down")


def _check_single_frame(image: Image.Image) -> None:
    if image.format == "MPO":  # a camera's JPEG with previews behind the picture proper
        return
    position = image.tell()
    try:
        image.seek(position + 1)
    except EOFError:
        if position == 0:
            return
    image.seek(position)
    raise _refused("has several frames; give one still picture")


def _opaque_rgb(image: Image.Image) -> UInt8[np.ndarray, "height width 3"]:
    if image.mode in _SIXTEEN_BIT:
        return _grey_from_16_bit(image)
    if image.mode == "F":
        raise _refused("holds floating point samples; give an array in [0, 1] instead")
    if image.mode in {"La", "RGBa"} or image.has_transparency_data:
        straight = image.convert("LA") if image.mode == "La" else image
        rgba = straight.convert("RGBA")
        background = Image.new("RGBA", image.size, BACKGROUND)
        image = Image.alpha_composite(background, rgba)
    return np.array(image.convert("RGB"))


def _grey_from_16_bit(image: Image.Image) -> UInt8[np.ndarray, "height width 3"]:
    samples: Num[np.ndarray, "height width"] = np.array(image).astype(np.int64)
    if samples.min() < 0 or samples.max() > _WHITE_16:
        raise _refused(
            f"holds samples from {samples.min()} to {samples.max()}; grey needs 0 to {_WHITE_16}"
        )
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        samples[samples == transparent] = _WHITE_16
    # 65535 is 255 * 257, so this rounds to nearest and keeps black and white.
    grey = ((samples + 128) // 257).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)


# ------------------------------------------------------------------ arrays and tensors


def _from_array(source: object) -> SourceImage | None:
    """Normalise an array [H, W, 3] or a tensor [3, H, W], either with a leading 1.

    uint8 samples are kept. Others may be in [0, 255], [0, 1] or [-1, 1]: a largest sample above 1
    means the first; without a negative sample the range is mapped by 2x - 1, so a picture in
    [-1, 1] that holds none is taken for [0, 1].

    Returns:
        The picture, or ``None`` where ``source`` is neither array nor tensor.
    """
    if isinstance(source, np.ndarray):
        height, width, channels = _one_image(source.shape, "H, W, 3")
        _check_pixels(width, height)
        samples = source
    elif _is_tensor(source):
        channels, height, width = _one_image(source.shape, "3, H, W")
        _check_pixels(width, height)
        samples = _on_host(source).reshape(channels, height, width).transpose(1, 2, 0)
    else:
        return None
    samples = samples.reshape(height, width, channels)
    if samples.dtype == np.uint8:
        return SourceImage(rgb=np.array(samples, order="C"))
    return SourceImage(signed=_signed(samples))


def _is_tensor(source: object) -> "TypeGuard[Tensor]":
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(source, torch.Tensor)


def _one_image(shape: Sequence[int], needed: str) -> tuple[int, int, int]:
    sizes = tuple(shape[1:] if len(shape) == 4 and shape[0] == 1 else shape)
    if len(sizes) != 3 or sizes[needed.split(", ").index("3")] != 3:
        raise _refused(f"needs shape [{needed}] or [1, {needed}], got {list(shape)}")
    return sizes


def _on_host(tensor: "Tensor") -> Shaped[np.ndarray, "..."]:
    """Samples as numpy; half-width types, which numpy may not know, become float32."""
    host = tensor.detach().cpu()
    if host.is_floating_point() and host.element_size() < 4:
        host = host.float()
    return host.numpy()


def _signed(samples: Shaped[np.ndarray, "height width 3"]) -> Float32[np.ndarray, "height width 3"]:
    if samples.dtype.kind not in "fiu":
        raise _refused(f"needs numbers, got type {samples.dtype}")
    values = np.array(samples, dtype=np.float32, order="C")
    if not np.isfinite(values).all():
        raise _refused("holds NaN or infinity")
    low, high = float(values.min()), float(values.max())
    if low < -1.0 or high > _BYTE or (low < 0.0 and high > 1.0):
        raise _refused(f"needs samples in [0, 255], [0, 1] or [-1, 1], got [{low:g}, {high:g}]")
    if high > 1.0:
        values /= _BYTE
    if low >= 0.0:
        values = values * np.float32(2.0) - np.float32(1.0)
    return values
