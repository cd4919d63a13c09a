"""Parsing of ``vae/config.json``: what is accepted, and what is refused with which words."""

import json
import logging
import re

import pytest

from tests.helpers.vae_builders import tiny_fields
from vllm_omni.diffusion.models.lingbot_world.vae.config import VaeConfig
from vllm_omni.errors import CheckpointError

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


def test_reads_the_tiny_checkpoint():
    config = VaeConfig.from_json(tiny_fields())
    assert config.encoder_dims == (8, 8, 16, 32, 32)
    assert config.decoder_dims == (32, 32, 32, 16, 8)
    assert config.temperal_downsample == (False, True, True)
    assert config.latents_mean[0] == -0.7571
    assert config.latents_std[-1] == 1.916


def test_optional_fields_may_be_absent():
    fields = tiny_fields()
    for name in ("attn_scales", "is_residual", "patch_size", "scale_factor_spatial", "dropout",
                 "scale_factor_temporal", "in_channels", "out_channels",
                 "decoder_base_dim"):  # fmt: skip
        del fields[name]
    assert VaeConfig.from_json(fields) == VaeConfig.from_json(tiny_fields())


def test_the_decoder_may_have_its_own_width():
    config = VaeConfig.from_json({**tiny_fields(), "decoder_base_dim": 12})
    assert config.encoder_dims[0] == 8
    assert config.decoder_dims == (48, 48, 48, 24, 12)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_class_name", "AutoencoderKL"),
        ("attn_scales", [0.5]),
        ("is_residual", True),
        ("patch_size", 2),
        ("in_channels", 12),
        ("out_channels", 12),
        ("scale_factor_temporal", 8),
        ("scale_factor_spatial", 16),
        ("base_dim", 0),
        ("base_dim", 2.5),
        ("base_dim", None),
        ("base_dim", True),
        ("z_dim", "16"),
        ("num_res_blocks", 0),
        ("dim_mult", [1, 2, 4]),
        ("dim_mult", [1, 2, 4, -4]),
        ("temperal_downsample", [False, False, True]),
        ("temperal_downsample", [True, True, True]),
        ("temperal_downsample", [0, 1, 1]),
        ("temperal_downsample", [False, True]),
        ("latents_mean", [0.0] * 15),
        ("latents_mean", "sixteen numbers"),
        ("latents_std", [1.0] * 15 + [0.0]),
        ("latents_std", [1.0] * 15 + ["x"]),
    ],
)
def test_other_kinds_are_refused_by_field(name: str, value: object):
    with pytest.raises(CheckpointError) as refusal:
        VaeConfig.from_json({**tiny_fields(), name: value})
    # A wrong item of a list is named by its place and shown alone.
    said = re.fullmatch(
        rf"vae/config.json: {name}(\.\d+)?: must .+, got (.+); .+", str(refusal.value)
    )
    assert said is not None
    got = json.loads(said[2])
    assert got == value or got in value


def test_odd_channels_cannot_be_halved():
    with pytest.raises(
        CheckpointError, match=r"dim_mult: must make even channels .*, got \[3, 6, 6\]"
    ):
        VaeConfig.from_json({**tiny_fields(), "base_dim": 3, "dim_mult": [1, 1, 2, 2]})


def test_unknown_fields_are_named_once(monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    logger = logging.getLogger("vllm_omni.diffusion.models.lingbot_world.vae.config")
    monkeypatch.setattr(logger, "warning", lambda text, *args: lines.append(text % args))
    VaeConfig.from_json({**tiny_fields(), "colour_of_the_sky": "blue", "_private": 1})
    assert lines == ["vae/config.json: no effect: colour_of_the_sky"]
