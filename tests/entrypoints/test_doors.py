"""One wrong request, one answer: the same text and code at every way in; nothing is fetched.

WebSocket, JSON and form of the HTTP routes, both Python classes and the deployment's defaults.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.helpers.fake_checkpoint import write_fake_checkpoint
from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.local_server import CPU_TINY, LocalServer, NoImages, local_server
from tests.helpers.socket_client import picture_url, socket_client
from vllm_omni import AsyncOmni, Omni
from vllm_omni.config.resolve import resolve
from vllm_omni.errors import ConfigError, InvalidRequestError
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

GOOD = {"prompt": "a harbour", "image": picture_url(), "height": 64, "width": 96, "num_frames": 21,
        "fps": 16, "seed": 7}  # fmt: skip
CHUNK = [[], [], []]
HALF = "holds half of a surrogate pair, which is no character; send whole ones"


@dataclass(frozen=True)
class Wrong:
    """A mistake: what is given, and what is said about which field."""

    given: dict[str, object]
    field: str
    text: str


CASES = [
    Wrong({"prompt": " \n"}, "prompt", "must not be blank"),
    Wrong({"prompt": "a road \ud83d"}, "prompt", HALF),
    Wrong({"negative_prompt": "\udc00"}, "negative_prompt", HALF),
    Wrong({"image": None}, "image", "is required: the first picture of the world"),
    Wrong({"num_frames": 10}, "num_frames", "a rollout has 9 + 12k pixel frames (9, 21, 33, 45, "
          "...), got 10; nearest: 9 and 21"),
    Wrong({"num_frames": True}, "num_frames", "must be an integer, got true"),
    Wrong({"num_frames": 0}, "num_frames", "must be at least 1, got 0"),
    Wrong({"num_frames": 10**9}, "num_frames", "must be at most 11999997, got 1000000000"),
    Wrong({"height": 65}, "height",
          "must be a positive multiple of 16 pixels, got 65 (size 96x65)"),
    Wrong({"width": 4112}, "width", "must be at most 4096, got 4112"),
    Wrong({"fps": 0.5}, "fps", "must be at least 1, got 0.5"),
    Wrong({"fps": 1001}, "fps", "must be at most 1000, got 1001"),
    Wrong({"fps": False}, "fps", "must be a number, got false"),
    Wrong({"seed": 1.5}, "seed", "must be an integer, got 1.5"),
    Wrong({"seed": 2**63}, "seed",
          "must be at most 9223372036854775807, got 9223372036854775808"),
    Wrong({"num_inference_steps": 8}, "num_inference_steps", "must be 4, got 8"),
    Wrong({"num_outputs_per_prompt": 2}, "num_outputs_per_prompt", "must be 1, got 2"),
    Wrong({"guidance_scale": 21}, "guidance_scale", "must be at most 20, got 21"),
    Wrong({"extra_args": {"flow_shift": -1}}, "extra_args.flow_shift", "must be above 0, got -1"),
    Wrong({"extra_args": {"flow_shfit": 3}}, "extra_args",
          "unknown key 'flow_shfit'; did you mean 'flow_shift'?"),
    Wrong({"extra_args": {"camera_action_script": [CHUNK]}}, "extra_args.camera_action_script",
          "needs 2 chunks for num_frames 21, got 1"),
    Wrong({"extra_args": {"camera_action_script": [CHUNK, [["q"], [], []]]}},
          "extra_args.camera_action_script",
          "chunk 1: unknown camera key 'q'; keys are w a s d i j k l"),
    Wrong({"extra_args": {"action_path": "walk"}}, "extra_args.action_path",
          "no trusted root is configured; set model_config.lingbot_action_root or "
          "VLLM_OMNI_LINGBOT_ACTION_ROOT"),
    Wrong({"prompt": "x" * 32_769}, "prompt",
          f'must have at most 32768 characters, got "{"x" * 79}...'),
]  # fmt: skip
every_case = pytest.mark.parametrize("wrong", CASES, ids=lambda wrong: f"{wrong.field}"[:24])
PYTHON_NAMES = {"image": "multi_modal_data.image"}
WIRE_NAMES = {"image": "image_reference", "extra_args": "extra_params"}


def told(wrong: Wrong, names: dict[str, str]) -> str:
    """The whole text, with the field's name at this way in."""
    head, dot, tail = wrong.field.partition(".")
    return f"{names.get(head, head)}{dot}{tail}: {wrong.text}"


def wire_fields(wrong: Wrong) -> dict[str, object]:
    given = GOOD | wrong.given
    image, extra = given.pop("image"), given.pop("extra_args", None)
    fields = {**given, "image_reference": image and {"image_url": image}, "extra_params": extra}
    return {name: value for name, value in fields.items() if value is not None}


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with local_server(images=NoImages()) as running:
        yield running


@every_case
async def test_websocket(server, wrong):
    async with socket_client(server.url) as client:
        await client.say(json.dumps({"type": "session.start", **wire_fields(wrong)}))
        error = await client.expect("error")
    assert (error["message"], error["code"]) == (told(wrong, WIRE_NAMES), "invalid_request")


@every_case
@pytest.mark.parametrize("kind", ["json", "form"])
async def test_http(server, wrong, kind):
    fields = wire_fields(wrong)
    said = {"content": json.dumps(fields), "headers": {"content-type": "application/json"}}
    if kind == "form":
        if any(isinstance(value, bool) for value in wrong.given.values()):
            pytest.skip("a form has no booleans")
        if wrong.text == HALF:
            pytest.skip("a form is UTF-8")
        objects = {n: json.dumps(v) if isinstance(v, dict) else f"{v}" for n, v in fields.items()}
        said = {"data": objects}
    async with httpx.AsyncClient(timeout=30) as client:
        answer = await client.post(f"http://127.0.0.1:{server.port}/v1/videos/sync", **said)
    error = answer.json()["error"]
    assert error["message"] == told(wrong, WIRE_NAMES)
    assert (error["type"], answer.status_code // 100) == ("invalid_request", 4)
    assert error["param"] == error["message"].partition(": ")[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_fake_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint"))


@pytest.fixture
def no_workers(monkeypatch) -> None:
    monkeypatch.setattr(
        "vllm_omni.entrypoints.engine_client.create_executor", lambda _: FakeExecutor()
    )


def python_request(wrong: Wrong) -> tuple[dict[str, object], OmniDiffusionSamplingParams]:
    given = GOOD | wrong.given
    prompt = {"prompt": given.pop("prompt"), "multi_modal_data": {"image": given.pop("image")}}
    if "negative_prompt" in given:
        prompt["negative_prompt"] = given.pop("negative_prompt")
    params = OmniDiffusionSamplingParams()
    for name, value in given.items():  # Afterwards: tests check the types of arguments.
        setattr(params, name, value)
    return prompt, params


@every_case
@pytest.mark.usefixtures("no_workers")
def test_omni(model, wrong):
    with Omni(model, deploy_config=str(CPU_TINY)) as omni:
        with pytest.raises(InvalidRequestError) as caught:
            omni.generate(*python_request(wrong), use_tqdm=False)
        assert str(caught.value) == told(wrong, PYTHON_NAMES)
        assert caught.value.code == "invalid_request"


@every_case
@pytest.mark.usefixtures("no_workers")
async def test_async_omni(model, wrong):
    omni = AsyncOmni(model, deploy_config=str(CPU_TINY))
    try:
        with pytest.raises(InvalidRequestError) as caught:
            await anext(omni.generate(*python_request(wrong)))
        assert str(caught.value) == told(wrong, PYTHON_NAMES)
        assert caught.value.code == "invalid_request"
    finally:
        omni.shutdown()


DEFAULTS = [wrong for wrong in CASES
            if wrong.field in {"num_frames", "fps", "seed", "height", "width"}]  # fmt: skip


@pytest.mark.parametrize("wrong", DEFAULTS, ids=lambda wrong: wrong.field)
def test_defaults_of_the_deployment(model, wrong):
    size = {} if wrong.field not in {"height", "width"} else {"height": 64, "width": 96}
    with pytest.raises(ConfigError) as caught:
        resolve(model, stage_overrides={"0": {"default_sampling_params": size | wrong.given}})
    assert f"default_sampling_params.{wrong.field}" in str(caught.value)
    assert str(caught.value).endswith(wrong.text)
