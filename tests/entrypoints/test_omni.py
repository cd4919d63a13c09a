"""The synchronous Python API on the tiny model."""

import asyncio
import threading
from types import GeneratorType

import numpy as np
import pytest
from PIL import Image

from tests.helpers.local_server import CPU_TINY
from tests.helpers.socket_client import picture_url
from tests.helpers.tiny import tiny_checkpoint_dir
from vllm_omni import Omni
from vllm_omni.errors import InvalidRequestError, OmniError, SessionClosedError
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

PROMPT = {"prompt": "a harbour", "multi_modal_data": {"image": picture_url()}}
SCRIPT = {"camera_action_script": [[["w"], ["w"], ["l"]]]}

SCRIPT_OF_TWO = SCRIPT["camera_action_script"] * 2


def params(**changes: object) -> OmniDiffusionSamplingParams:
    """One scripted chunk at 64x96."""
    fields = {"height": 64, "width": 96, "num_frames": 9, "seed": 7, "extra_args": SCRIPT}
    return OmniDiffusionSamplingParams(**(fields | changes))


@pytest.fixture(scope="module")
def omni():
    with Omni(str(tiny_checkpoint_dir()), device="cpu", dtype="float32") as made:
        yield made


def test_one_prompt_gives_a_list_of_one_clip(omni):
    (output,) = omni.generate(PROMPT, params(), use_tqdm=False)
    assert output.finished
    assert output.images[0].shape == (9, 64, 96, 3)
    assert output.images[0].dtype == np.float32
    assert set(output.stage_durations) == {"condition", "camera", "probes", "decode"}
    assert output.peak_memory_mb > 0


def test_progress_counts_chunks_and_a_refusal_leaves_no_bar(omni, capsys):
    two = params(num_frames=21, extra_args={"camera_action_script": SCRIPT_OF_TWO})
    omni.generate([PROMPT, PROMPT], [two, params()])
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "chunks" in shown
    with pytest.raises(InvalidRequestError):
        omni.generate(PROMPT, params(num_frames=10))
    assert capsys.readouterr().err.split("\r")[-1].strip() == ""


def test_prompts_and_parameters_are_paired(omni):
    outputs = omni.generate([PROMPT, PROMPT], [params(seed=1), params(seed=2)], use_tqdm=False)
    shared = omni.generate([PROMPT, PROMPT], params(seed=2), use_tqdm=False)
    # Bitwise.
    assert not np.array_equal(outputs[0].images[0], outputs[1].images[0])
    assert all(np.array_equal(o.images[0], outputs[1].images[0]) for o in shared)
    with pytest.raises(InvalidRequestError, match="2 prompts"):
        omni.generate([PROMPT, PROMPT], [params()] * 3)


def test_a_generator_on_demand(omni):
    outputs = omni.generate([PROMPT] * 3, params(), py_generator=True)
    assert isinstance(outputs, GeneratorType)
    assert next(outputs).finished
    outputs.close()
    assert len(omni.generate(PROMPT, params(), use_tqdm=False)) == 1


def test_kinds_of_output(omni):
    (pictures,) = omni.generate(PROMPT, params(output_type="pil"), use_tqdm=False)
    assert isinstance(pictures.images[0][0], Image.Image)
    (latent,) = omni.generate(PROMPT, params(output_type="latent"), use_tqdm=False)
    assert tuple(latent.latents.shape) == (1, 16, 3, 8, 12)


def test_the_deployment_decides_the_kind_where_a_request_does_not():
    """The shipped files ask for PIL pictures."""
    with Omni(
        str(tiny_checkpoint_dir()), deploy_config=str(CPU_TINY), streaming_output=False,
        distributed_executor_backend="inline",
    ) as made:  # fmt: skip
        (pictures,) = made.generate(PROMPT, params(), use_tqdm=False)
        assert [type(frame) for frame in pictures.images[0]] == [Image.Image] * 9
        (arrays,) = made.generate(PROMPT, params(output_type="np"), use_tqdm=False)
        assert arrays.images[0].dtype == np.float32
    # The same frames, up to the rounding to bytes.
    difference = np.abs(np.stack(pictures.images[0]) - arrays.images[0] * 255.0)
    assert difference.max() <= 1.0


def test_it_works_where_a_loop_is_running(omni):
    async def inside() -> int:
        return len(omni.generate(PROMPT, params(), use_tqdm=False))

    assert asyncio.run(inside()) == 1


def test_a_bad_request_leaves_it_usable(omni):
    with pytest.raises(InvalidRequestError):
        omni.generate(PROMPT, params(num_frames=10), use_tqdm=False)
    assert len(omni.generate(PROMPT, params(), use_tqdm=False)) == 1


def test_anything_later_closes_it(monkeypatch):
    made = Omni(str(tiny_checkpoint_dir()), device="cpu", dtype="float32")

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr("vllm_omni.diffusion.models.lingbot_world.pipeline.commit", broken)
    with pytest.raises(OmniError, match="RuntimeError"):
        made.generate(PROMPT, params(), use_tqdm=False)
    monkeypatch.undo()
    with pytest.raises(SessionClosedError, match="closed"):
        made.generate(PROMPT, params(), use_tqdm=False)
    made.close()


def test_close_ends_its_threads():
    before = set(threading.enumerate())
    made = Omni(str(tiny_checkpoint_dir()), device="cpu", dtype="float32")
    made.generate(PROMPT, params(), use_tqdm=False)
    made.close()
    made.close()
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not left & {"engine", "omni loop"}
