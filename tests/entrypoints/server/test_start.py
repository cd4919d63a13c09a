"""``session.start``: fields, alternative spellings and what they resolve to."""

import json

import pytest

from vllm_omni.diffusion.messages import EncoderOptions
from vllm_omni.entrypoints.server.protocol import SessionStart, parse_start
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.request import RolloutRequest

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

URL = "data:image/png;base64,AAAA"


def start(**fields: object) -> SessionStart:
    base = {"type": "session.start", "prompt": "a", "image_reference": {"image_url": URL}}
    return parse_start(json.dumps(base | fields))


def values(*, native_fps: float = 16.0, **fields: object) -> dict[str, object]:
    """What the message means, as values of a request."""
    return start(**fields).rollout_fields(native_fps)


def request_of(message: SessionStart) -> RolloutRequest:
    given = message.rollout_fields(native_fps=16.0)
    return RolloutRequest.model_validate({k: v for k, v in given.items() if v is not None})


def test_defaults():
    message, given = start(), values()
    assert (given["prompt"], given["image"]) == ("a", URL)
    assert [given[name] for name in ("width", "height", "num_frames", "seed")] == [None] * 4
    assert given["fps"] == 24
    assert (message.queue, message.unbounded, message.max_lead_ms) == (False, False, None)
    assert given["extra_args"] == {}
    assert message.encoder_options() == EncoderOptions()


def test_every_value_is_a_field_of_the_request():
    assert set(values()) <= set(RolloutRequest.model_fields)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"width": 64, "height": 48}, (64, 48)),
        ({"width": 64}, (None, None)),
        ({"height": 48}, (None, None)),
        ({"size": "320x192", "width": 64, "height": 48}, (320, 192)),
        ({"video_params": {"width": 64, "height": 48}}, (64, 48)),
        ({"width": 80, "video_params": {"width": 64, "height": 48}}, (80, 48)),
    ],
)
def test_size(fields, size):
    given = values(**fields)
    assert (given["width"], given["height"]) == size


@pytest.mark.parametrize(
    ("fields", "frames", "fps"),
    [
        ({"num_frames": 33, "seconds": "9", "fps": 16}, 33, 16),
        ({"video_params": {"num_frames": 21, "fps": 12.5}}, 21, 12.5),
        ({"fps": 30, "video_params": {"fps": 12.5}}, None, 30),
        ({"seconds": "3", "fps": 7}, 21, 7),
        ({"seconds": "2", "fps": 10.6}, 21, 10.6),
        ({"seconds": "5", "num_frames": 80}, 80, 24),
    ],
)
def test_length_and_rate(fields, frames, fps):
    given = values(**fields)
    assert (given["num_frames"], given["fps"]) == (frames, fps)


@pytest.mark.parametrize(
    ("fields", "frames", "fps"),
    [
        ({"seconds": "5"}, 81, 16),
        ({"seconds": "4"}, 69, 16),
        ({"seconds": "5", "fps": 24}, 117, 24),
        ({"seconds": "1", "fps": 8.5}, 9, 8.5),
        ({"seconds": "1", "fps": 1}, 9, 1),
        ({"seconds": "3", "fps": 5}, 21, 5),
        ({"seconds": "2", "video_params": {"fps": 10.4}}, 21, 10.4),
    ],
)
def test_seconds_become_the_nearest_length_at_the_rate_of_the_client_or_the_model(
    fields, frames, fps
):
    given = values(native_fps=16.0, **fields)
    assert (given["num_frames"], given["fps"]) == (frames, fps)


@pytest.mark.parametrize("fps", [16, 24, 30])
def test_no_length_is_nearer(fps):
    lengths = [9 + 12 * k for k in range(600)]
    for seconds in range(1, 200):
        frames = values(seconds=str(seconds), fps=fps)["num_frames"]
        assert abs(frames - seconds * fps) == min(abs(n - seconds * fps) for n in lengths)


def test_sampling_params_are_lifted_unless_present_and_the_rest_is_extra():
    given = values(
        seed=1,
        sampling_params={
            "seed": 2, "num_frames": 21, "camera_action_script": [], "both": 1,
            "extra_params": {"both": 2, "inner": 3},
        },
        extra_params={"outer": 4, "inner": 5},
    )  # fmt: skip
    assert (given["seed"], given["num_frames"]) == (1, 21)
    assert given["extra_args"] == {"camera_action_script": [], "both": 2, "inner": 5, "outer": 4}


def test_flow_shift_joins_the_extra_arguments():
    both = values(flow_shift=3.0, extra_params={"flow_shift": 7.0})
    assert both["extra_args"] == {"flow_shift": 3.0}
    assert values(extra_params={"flow_shift": 7.0})["extra_args"] == {"flow_shift": 7.0}


def test_encoder_options_are_taken_out_of_the_extra_arguments():
    message = start(
        extra_params={"video_codec_options": {"crf": "23"}, "preencode_mp4": False, "x": 1}
    )
    assert message.encoder_options().crf == 23
    assert message.rollout_fields()["extra_args"] == {"x": 1}


def test_unknown_fields_are_ignored_and_nulls_mean_absent():
    assert start(colour="red", seed=None, extra_params=None, size=None) == start()


def test_the_echo_has_defaults_and_no_nulls():
    message = start(negative_prompt=None)
    config = message.config(request_of(message))
    assert config["image_reference"] == {"image_url": URL}
    assert config["num_outputs_per_prompt"] == 1
    assert "type" not in config
    assert None not in config.values()
    assert "num_frames" not in config


@pytest.mark.parametrize(
    ("seed", "told"),
    [(4, 4), (2**53, 2**53), (-(2**53), -(2**53)), (2**53 + 1, "9007199254740993"),
     (-(2**63), "-9223372036854775808"), ("9007199254740993", "9007199254740993"), (7.0, 7)],
)  # fmt: skip
def test_the_echo_tells_a_seed_as_any_client_can_read_it(seed, told):
    message = start(seed=seed)
    assert message.config(request_of(message))["seed"] == told


def test_the_echo_tells_the_seed_that_was_drawn():
    request = request_of(start())
    assert start().config(request)["seed"] == request.seed < 2**53


def test_the_echo_tells_the_length_that_seconds_became():
    message = start(seconds="4")
    config = message.config(request_of(message))
    assert (config["seconds"], config["num_frames"], config["fps"]) == ("4", 69, 16)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", None),
        ("format", "mp4"),
        ("width", 0),
        ("width", True),
        ("width", 1.5),
        ("num_frames", -3),
        ("num_frames", "many"),
        ("fps", 0.5),
        ("fps", False),
        ("size", "64*48"),
        ("size", "64x0"),
        ("size", "064x64"),
        ("prompt", "x" * 32_769),
        ("width", 4097),
        ("flow_shift", 1001),
        ("num_frames", 12_000_009),
        ("seconds", "0"),
        ("seconds", 4),
        ("seed", 2**63),
        ("num_inference_steps", 201),
        ("guidance_scale", 21),
        ("boundary_ratio", 1.5),
        ("flow_shift", 0),
        ("quality", "low"),
        ("num_outputs_per_prompt", 11),
        ("image_reference", [{"image_url": URL}]),
        ("image_reference", {"file_id": "f"}),
        ("image_reference", {"file_id": "f", "image_url": URL}),
        ("lora", "adapter"),
        ("extra_params", [1]),
        ("sampling_params", "x"),
        ("max_lead_ms", -1),
        ("queue", 7),
    ],
)
def test_a_bad_field_is_named(field, value):
    with pytest.raises(InvalidRequestError) as caught:
        start(**{field: value})
    assert caught.value.field.split(".")[0] == field


def test_digits_in_text_are_numbers():
    message = start(num_frames="21", fps="16", width=64.0)
    assert (message.num_frames, message.fps, message.width) == (21, 16.0, 64)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_frames": 9},
        {"seconds": "3"},
        {"video_params": {"num_frames": 9}},
        {"sampling_params": {"num_frames": 9}},
        {"extra_params": {"action_path": "p"}},
        {"sampling_params": {"camera_action_script": []}},
    ],
)
def test_unbounded_excludes_a_length(fields):
    with pytest.raises(InvalidRequestError, match="unbounded excludes"):
        start(unbounded=True, **fields)


def test_unbounded():
    message = start(unbounded=True, queue=True, max_lead_ms=500)
    assert message.rollout_fields()["num_frames"] is None
    assert (message.unbounded, message.queue, message.max_lead_ms) == (True, True, 500)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"lora": {"name": "l"}}, "lora"),
        ({"extra_params": {"preencode_mp4": True}}, "extra_params.preencode_mp4"),
    ],
)
def test_what_no_stream_can_do_is_refused(fields, field):
    with pytest.raises(InvalidRequestError) as caught:
        values(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ("preset=fast", "", "must be an object of preset, crf, tune, bitrate"),
        (["preset"], "", "must be an object"),
        ({"x264-params": "x"}, "", "unknown key 'x264-params'; known are bitrate, crf, "),
        ({"bitrate": "1M", "crf": 20}, "", "give crf or bitrate, not both"),
        ({"preset": "placebo"}, ".preset", "must be ultrafast, superfast, .* got"),
        ({"crf": 0}, ".crf", "must be at least 1, got 0"),
        ({"bitrate": "4G"}, ".bitrate", 'must be an integer, got "4G"'),
    ],
)
def test_encoder_options_are_refused_by_name(options, field, words):
    message = start(extra_params={"video_codec_options": options})
    with pytest.raises(InvalidRequestError, match=words) as caught:
        message.rollout_fields()
    assert caught.value.field == f"extra_params.video_codec_options{field}"


def test_model_name():
    start().check_model(("world",))
    start(model="world").check_model(("lingbot", "world"))
    with pytest.raises(InvalidRequestError, match=r"model: .*'other'.*served: lingbot, world"):
        start(model="other").check_model(("lingbot", "world"))
