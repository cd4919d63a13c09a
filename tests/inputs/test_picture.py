"""Pictures: the same pixels from every entry, stated conversions, and what is refused."""

import base64
import io
import os
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.helpers.golden import golden_dir, requires_golden
from tests.helpers.pictures import ALPHA, NOISE, RNG, WHITE, encoded, over_white, refused
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.picture import MAX_SOURCE_PIXELS, load_image

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


# --- every entry, every kind of file --------------------------------------------------------------


def exif_rotated():
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(Image.fromarray(NOISE), "JPEG", exif=exif, quality=95)


def palette_with_transparency():
    image = Image.fromarray(NOISE).quantize(16)
    return encoded(image, "PNG", transparency=3)


KINDS = {
    "rgb_png": lambda: encoded(Image.fromarray(NOISE)),
    "rgb_bmp": lambda: encoded(Image.fromarray(NOISE), "BMP"),
    "rgb_tiff": lambda: encoded(Image.fromarray(NOISE), "TIFF"),
    "rgb_webp": lambda: encoded(Image.fromarray(NOISE), "WEBP", lossless=True),
    "jpeg": lambda: encoded(Image.fromarray(NOISE), "JPEG"),
    "exif_6": exif_rotated,
    "rgba": lambda: encoded(Image.fromarray(np.dstack([NOISE, ALPHA]))),
    "la": lambda: encoded(Image.fromarray(np.dstack([NOISE[..., 0], ALPHA]), "LA")),
    "l": lambda: encoded(Image.fromarray(NOISE[..., 0])),
    "1": lambda: encoded(Image.fromarray(NOISE[..., 0] > 127)),
    "palette": palette_with_transparency,
    "16_bit": lambda: encoded(Image.fromarray(NOISE[..., 0].astype(np.uint16) * 257)),
    "16_bit_tiff": lambda: encoded(Image.fromarray(NOISE[..., 0].astype(np.uint16) * 257), "TIFF"),
    "cmyk": lambda: encoded(Image.fromarray(NOISE).convert("CMYK"), "JPEG"),
    "still_gif": lambda: encoded(Image.fromarray(NOISE[..., 0]), "GIF"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_gives_the_same_pixels(kind, tmp_path):
    """Bitwise: path, Path, bytes, data URL and PIL image are one decoder."""
    content = KINDS[kind]()
    path = tmp_path / "picture.bin"
    path.write_bytes(content)
    url = "data:image/anything;base64," + base64.b64encode(content).decode()
    expected = load_image(content).rgb
    assert expected.dtype == np.uint8
    assert expected.flags.c_contiguous
    with Image.open(path) as opened:
        sources = [str(path), path, bytearray(content), memoryview(content), url, opened]
        for source in sources:
            assert np.array_equal(load_image(source).rgb, expected)


@pytest.mark.parametrize("kind", ["rgb_png", "rgb_bmp", "rgb_tiff", "rgb_webp"])
def test_lossless_files_keep_every_bit(kind):
    assert np.array_equal(load_image(KINDS[kind]()).rgb, NOISE)
    assert np.array_equal(load_image(Image.fromarray(NOISE)).rgb, NOISE)


def test_exif_orientation_is_applied():
    stored = np.array(Image.open(io.BytesIO(exif_rotated())))
    assert np.array_equal(load_image(exif_rotated()).rgb, np.rot90(stored, -1))


def test_transparency_shows_white():
    """Lossy by at most one level of rounding."""
    rgba = load_image(KINDS["rgba"]()).rgb
    assert np.abs(rgba - over_white(NOISE, ALPHA)).max() <= 1
    grey = load_image(KINDS["la"]()).rgb
    expected = over_white(np.repeat(NOISE[..., :1], 3, axis=2), ALPHA)
    assert np.abs(grey - expected).max() <= 1
    clear = Image.fromarray(np.dstack([NOISE, np.zeros_like(ALPHA)]))
    assert (load_image(clear).rgb == WHITE).all()


def test_palette_transparency_shows_white():
    content = palette_with_transparency()
    opened = Image.open(io.BytesIO(content))
    index = np.array(opened)
    assert (index == 3).any()
    colours = np.array(opened.getpalette("RGB"), np.uint8).reshape(-1, 3)
    expected = np.where((index == 3)[..., None], WHITE, colours[index])
    assert np.array_equal(load_image(content).rgb, expected)


def test_a_transparent_colour_of_a_png_shows_white():
    image = Image.fromarray(NOISE)
    key = tuple(int(value) for value in NOISE[4, 5])
    loaded = load_image(encoded(image, transparency=key)).rgb
    assert (loaded[4, 5] == WHITE).all()
    grey = Image.fromarray(np.uint16([[0, 5000, 65535]]))
    loaded = load_image(encoded(grey, transparency=5000)).rgb
    assert loaded[0, :, 0].tolist() == [0, WHITE, WHITE]


def test_grey_is_spread_over_three_channels():
    assert np.array_equal(load_image(KINDS["l"]()).rgb, np.repeat(NOISE[..., :1], 3, axis=2))
    assert set(np.unique(load_image(KINDS["1"]()).rgb)) == {0, WHITE}


def test_sixteen_bits_are_scaled_not_clipped():
    samples = np.uint16([[0, 1, 128, 129, 255, 256, 257, 32768, 65534, 65535]])
    expected = np.round(samples / 257.0)[0].tolist()
    for kind in ("PNG", "TIFF"):
        loaded = load_image(encoded(Image.fromarray(samples), kind)).rgb
        assert loaded[0, :, 0].tolist() == expected
    big_endian = Image.frombytes("I;16B", (10, 1), samples.astype(">u2").tobytes())
    assert load_image(big_endian).rgb[0, :, 0].tolist() == expected
    wide = Image.fromarray(samples.astype(np.int32))
    assert wide.mode == "I"
    assert load_image(wide).rgb[0, :, 0].tolist() == expected


def test_sixteen_bit_colour_is_scaled():
    """Lossy: the decoder keeps the high byte, within one level of the scaled value."""
    samples = RNG.integers(0, 65536, size=(4, 5, 3), dtype=np.uint16)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    content = png(5, 4, rows, depth=16, colour=2)
    assert np.abs(load_image(content).rgb - samples / 257.0).max() <= 1


def test_cmyk_is_converted():
    image = Image.new("CMYK", (2, 2), (0, 255, 255, 0))
    assert load_image(image).rgb[0, 0].tolist() == [WHITE, 0, 0]


@pytest.mark.parametrize("size", [(1, 1), (5000, 10), (4096, 4096)])
def test_odd_and_large_sizes_load(size):
    assert load_image(Image.new("RGB", size)).rgb.shape == (size[1], size[0], 3)


def test_the_first_picture_of_a_camera_mpo_counts():
    other = Image.fromarray(255 - NOISE)
    content = encoded(Image.fromarray(NOISE), "MPO", save_all=True, append_images=[other])
    assert np.array_equal(load_image(content).rgb, np.array(Image.open(io.BytesIO(content))))


def test_the_given_pillow_image_is_left_as_it_was():
    image = Image.open(io.BytesIO(exif_rotated()))
    before = image.tobytes()
    load_image(image)
    assert image.size == (30, 20)
    assert image.getexif()[0x0112] == 6
    assert image.tobytes() == before


# --- refused files --------------------------------------------------------------------------------


def png(width, height, rows, depth=8, colour=2):
    def chunk(name, data):
        checksum = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + checksum

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def animated(kind):
    frames = [Image.fromarray(NOISE), Image.fromarray(255 - NOISE)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_animations_and_pages_are_refused(kind):
    content = animated(kind)
    refused(content, "several frames")
    with Image.open(io.BytesIO(content)) as image:
        refused(image, "several frames")
        assert image.tell() == 0
        image.seek(1)
        refused(image, "several frames")
        assert image.tell() == 1


@pytest.mark.parametrize(
    ("width", "height", "got"),
    [(20_000, 20_000, "400000000"), (10_000, 10_000, "100000000"), (4097, 4096, "16781312")],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bombs_are_refused_before_they_are_decoded(width, height, got, monkeypatch):
    """All sizes of the decoder's own check: raised, warned, and below both."""

    def decode(*_):
        raise AssertionError("decoded")

    monkeypatch.setattr(Image.core, "zip_decoder", decode, raising=True)
    text = refused(png(width, height, b""), f"at most {MAX_SOURCE_PIXELS} pixels")
    assert got in text


def test_the_operators_pixel_limit_counts(monkeypatch):
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "599")
    refused(Image.fromarray(NOISE), "at most 599 pixels, got 30x20 = 600")
    refused(NOISE, "at most 599 pixels, got 30x20 = 600")
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "600")
    assert load_image(NOISE).rgb.shape == (20, 30, 3)
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", str(10**9))
    refused(Image.new("1", (4097, 4096)), f"at most {MAX_SOURCE_PIXELS}")


@pytest.mark.parametrize(
    "kind", ["jpeg", "rgb_png", "rgb_bmp", "rgb_tiff", "rgb_webp", "still_gif"]
)
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_truncated_files_are_refused(kind, share):
    content = KINDS[kind]()
    refused(content[: int(len(content) * share)], "cannot be decoded|damaged or of an unknown")


@pytest.mark.parametrize(
    "content",
    [
        b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(200),
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.4",
        b"\x00" * 100,
        encoded(Image.fromarray(NOISE), "PPM"),
    ],
)
def test_unknown_formats_are_refused(content):
    assert "JPEG, PNG, WEBP" in refused(content, "damaged or of an unknown format")


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.binary(min_size=1, max_size=30), st.integers(0, 900))
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_load_or_are_refused(kind, junk, position):
    content = CONTENT[kind]
    position = min(position, len(content))
    damaged = content[:position] + junk + content[position + len(junk) :]
    try:
        loaded = load_image(damaged)
    except InvalidRequestError:
        return
    assert loaded.rgb.ndim == 3


CONTENT = {kind: make() for kind, make in KINDS.items()}


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (None, "got NoneType"),
        (7, "got int"),
        ([NOISE, NOISE], "needs one picture, got a list of 2"),
        (b"", "empty file"),
        ("https://example.com/a.png", "URLs are not fetched"),
        ("data:image/png,abc", "form data:image"),
        ("data:image/png;base64,@@@@", "valid base64"),
        ("data:image/png;base64,", "empty file"),
        (Image.new("F", (2, 2)), "floating point"),
        (Image.fromarray(np.int32([[70000]])), "from 70000 to 70000; grey needs 0 to 65535"),
        (Image.new("RGB", (0, 3)), "at least one pixel, got 0x3"),
    ],
)
def test_other_things_are_refused(source, match):
    refused(source, match)


def test_unreadable_paths_are_refused_without_naming_them(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("hello")
    cases = {
        "missing.png": "cannot be opened",
        ".": "not a regular file",
        "pipe": "not a regular file",
        "text.png": "damaged or of an unknown format",
        "empty.png": "damaged or of an unknown format",
        "a\0b": "the name is not usable",
    }
    for name, match in cases.items():
        text = refused(str(tmp_path / name), match)
        assert str(tmp_path) not in text
        assert name not in text or name == "."


@pytest.mark.parametrize("name", ["missing.png", "text.png", "."])
def test_a_path_is_named_where_a_traceback_is_seen_and_nowhere_else(tmp_path, monkeypatch, name):
    (tmp_path / "text.png").write_text("hello")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequestError) as caught:
        load_image(name)
    assert "png" not in str(caught.value)
    assert caught.value.__notes__ == [f"the file is {os.path.abspath(name)!r}"]


def test_a_picture_may_be_a_link(tmp_path):
    (tmp_path / "a.png").write_bytes(KINDS["rgb_png"]())
    (tmp_path / "b.png").symlink_to("a.png")
    assert np.array_equal(load_image(tmp_path / "b.png").rgb, NOISE)


@requires_golden
def test_a_real_photograph_loads():
    path = golden_dir() / "inputs" / "image.jpg"
    assert np.array_equal(load_image(path).rgb, np.array(Image.open(path).convert("RGB")))
