"""The protocol's reference pages are those that the message classes give."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from docs.reference import protocol_docs
from tests.helpers.requests import parse
from vllm_omni.diffusion.camera_motion import MOVE_STEP, CameraMotion
from vllm_omni.diffusion.messages import EncoderOptions, TokenizedPrompt
from vllm_omni.engine.interactions import ControlEvent, InteractionBox, SteeredCamera
from vllm_omni.entrypoints.server import protocol
from vllm_omni.errors import EventConflictError, InteractionError, InvalidRequestError
from vllm_omni.inputs.checking import validate
from vllm_omni.inputs.interaction import Interaction, control_event, parse_camera_payload
from vllm_omni.outputs.media import ChunkEncoder

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

STATIC = Path(protocol.__file__).parent / "static"


def test_the_committed_reference_is_up_to_date():
    assert protocol_docs.main(["--check"]) == 0


def test_a_stale_reference_is_noticed_and_rewritten(tmp_path, capsys):
    directory = ["--directory", str(tmp_path)]
    assert protocol_docs.main([*directory, "--check"]) == 1
    assert list(tmp_path.iterdir()) == []
    assert protocol_docs.main(directory) == 0
    assert protocol_docs.main([*directory, "--check"]) == 0
    page = tmp_path / protocol_docs.PAGE_FILE
    page.write_text(page.read_text().replace("session.ping", "session.pink"))
    assert protocol_docs.main([*directory, "--check"]) == 1
    assert "websocket_protocol.md is out of date" in capsys.readouterr().out


def test_the_page_has_a_section_for_each_message():
    page = protocol_docs.page_text()
    for model in protocol.CLIENT_MESSAGES + protocol.SERVER_MESSAGES:
        assert f"### `{protocol.type_of(model)}`" in page


# --- what the page says in words ------------------------------------------------------------------


def walking_payloads() -> dict[str, dict]:
    """The camera payloads of the section on walking, by what they are said to do."""
    lines = re.findall(r'^(\w[\w ]+?) {2,}(\{"mode".*)$', protocol_docs.page_text(), re.MULTILINE)
    return {name: json.loads(text) for name, text in lines}


def poses_after(*motions: CameraMotion) -> list[np.ndarray]:
    """Last pose of one chunk for each motion."""
    camera, poses = SteeredCamera(), []
    for index, motion in enumerate(motions):
        moved, _ = camera.advance({0: [ControlEvent(f"e{index}", camera=motion)]})
        poses.append(moved[-1])
    return poses


def test_the_steps_of_the_section_on_walking_do_what_it_says():
    payloads = walking_payloads()
    walk, turn, look, stand = (parse_camera_payload(payload) for payload in payloads.values())
    (pose,) = poses_after(walk)  # three latent frames
    assert pose[:3, 3] == pytest.approx([0, 0, 3 * 0.05])
    # A turn moves the view towards +X (right), a look towards -Y (up); 1e-6 is the page's rounding.
    right, up = math.radians(3 * 6), math.radians(3 * 4)
    assert poses_after(turn)[0][:3, 2] == pytest.approx(
        [math.sin(right), 0, math.cos(right)], abs=1e-5
    )
    assert poses_after(look)[0][:3, 2] == pytest.approx([0, -math.sin(up), math.cos(up)], abs=1e-5)
    walked, stopped = poses_after(walk, stand)
    assert np.array_equal(walked, stopped)
    without_mode = {
        name: value for name, value in payloads["stand still"].items() if name == "data"
    }
    _, back = poses_after(walk, parse_camera_payload(without_mode))
    assert np.array_equal(back, np.eye(4))


def test_a_velocity_goes_on_until_it_is_replaced():
    walk = parse_camera_payload(walking_payloads()["walk on"])
    camera = SteeredCamera()
    camera.advance({0: [ControlEvent("e", camera=walk)]})
    for _ in range(4):
        camera.advance({})
    assert camera.pose[2, 3] == pytest.approx(5 * 3 * 0.05)


def test_the_steps_are_those_of_the_web_page():
    source = (STATIC / "motion.js").read_text()
    assert f"const STEP = {MOVE_STEP};" in source
    assert "const YAW_STEP = (6 * Math.PI) / 180;" in source
    assert "const PITCH_STEP = (4 * Math.PI) / 180;" in source


def test_an_acknowledged_event_id_stays_taken_and_a_refused_one_does_not():
    box = InteractionBox(TokenizedPrompt("a"), live_camera=True, opened_s=0.0)
    box.submit(ControlEvent("e", prompt=TokenizedPrompt("b")), 0.0)
    box.plan("s", 0, 1.0)
    box.restart(TokenizedPrompt("a"))
    with pytest.raises(EventConflictError):
        box.submit(ControlEvent("e", prompt=TokenizedPrompt("c")), 1.0)
    scripted = InteractionBox(TokenizedPrompt("a"), live_camera=False, opened_s=0.0)
    walk = parse_camera_payload(walking_payloads()["walk on"])
    with pytest.raises(InteractionError):
        scripted.submit(ControlEvent("e", camera=walk), 0.0)
    scripted.submit(ControlEvent("e", prompt=TokenizedPrompt("b")), 0.0)


def test_misspelt_fields_are_ignored_where_the_page_says_so_and_refused_elsewhere():
    message = {"type": "session.start", "prompt": "a", "num_frame": 21,
               "image_reference": {"image_url": "data:,", "alt": "a harbour"}}  # fmt: skip
    config = protocol.parse_start(json.dumps(message)).model_dump(exclude_none=True)
    assert "num_frame" not in config
    assert config["image_reference"] == {"image_url": "data:,"}
    for refused in ({"extra_params": {"flow_shfit": 3}}, {"sampling_params": {"flow_shfit": 3}}):
        given = protocol.parse_start(json.dumps(message | refused)).rollout_fields()
        with pytest.raises(InvalidRequestError, match="flow_shift"):
            parse(extra_args=given["extra_args"])
    codec = {"extra_params": {"video_codec_options": {"cfr": 18}}}
    with pytest.raises(InvalidRequestError, match="cfr"):
        protocol.parse_start(json.dumps(message | codec)).rollout_fields()
    with pytest.raises(InteractionError, match="camra"):
        control_event(
            validate(Interaction, {"event": {"multi_modal_data": {"camra": {}}}}),
            ("camera",),
            TokenizedPrompt,
        )
    with pytest.raises(InteractionError, match="moode"):
        parse_camera_payload({"moode": "velocity", "data": {}})


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (EncoderOptions(), protocol_docs.NOISE_BYTES_PER_PIXEL),
        (EncoderOptions(crf=1.0), protocol_docs.MAX_BYTES_PER_PIXEL),
        (EncoderOptions(bitrate=200_000_000), protocol_docs.MAX_BYTES_PER_PIXEL),
    ],
    ids=["default", "best crf", "best bitrate"],
)
@pytest.mark.parametrize("levels", [2, 256])
def test_chunks_of_noise_stay_below_the_limit_that_the_page_names(options, limit, levels):
    """Measured, not derived: noise is the most that an encoder can be asked for."""
    height, width = 64, 96
    encoder = ChunkEncoder(width, height, 16, options)
    noise = np.random.default_rng(0).integers(0, levels, (12, height, width, 1)) * (
        255 // (levels - 1)
    )
    frames = np.repeat(noise.astype(np.uint8), 3, axis=3)
    sizes = [len(encoder.encode(frames)), len(encoder.encode(frames[::-1]))]
    encoder.close()
    assert max(sizes) <= limit * height * width
    assert max(sizes) >= limit * height * width / 2  # the limit is not idle talk
