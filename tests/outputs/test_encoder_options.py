"""Encoder options of a client: the list, the ranges, the refusals."""

import pytest

from vllm_omni.diffusion.messages import EncoderOptions
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.checking import validate

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


def parse(raw: dict[str, object]) -> EncoderOptions:
    return validate(EncoderOptions, raw, written=True)


def test_defaults_and_every_option():
    assert parse({}) == EncoderOptions()
    assert EncoderOptions().ffmpeg_options() == {
        "preset": "ultrafast", "crf": "18", "tune": "zerolatency",
    }  # fmt: skip
    film = parse({"preset": "fast", "crf": "23.5", "tune": "film"})
    assert (film.preset, film.crf, film.tune) == ("fast", 23.5, "film")


@pytest.mark.parametrize(
    ("text", "bits"), [("4M", 4_000_000), ("800k", 800_000), ("1.5m", 1_500_000), (64000, 64_000)]
)
def test_bitrate_replaces_the_constant_quality(text, bits):
    options = parse({"bitrate": text})
    assert options.bitrate == bits
    assert "crf" not in options.ffmpeg_options()


def test_latency_is_always_tuned_for():
    assert EncoderOptions().ffmpeg_options()["tune"] == "zerolatency"
    assert EncoderOptions(tune="film").ffmpeg_options()["tune"] == "film,zerolatency"


@pytest.mark.parametrize(
    "raw",
    [
        {"threads": "0"},
        {"x264-params": "log=/etc/passwd"},
        {"preset": "placebo"},
        {"preset": ["fast"]},
        {"tune": "touhou"},
        {"crf": 0},
        {"crf": 52},
        {"crf": True},
        {"crf": "18:log=1"},
        {"crf": float("nan")},
        {"bitrate": "4G"},
        {"bitrate": 1},
        {"bitrate": "9999M"},
        {"bitrate": False},
        {"bitrate": "1M", "crf": 20},
    ],
)
def test_anything_else_is_refused(raw):
    with pytest.raises(InvalidRequestError):
        parse(raw)
