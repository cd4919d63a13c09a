"""Embedded prompts: padding, the cache, and checkpoints that do not fit."""

import gc
import shutil
import threading
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import UMT5EncoderModel

from tests.helpers.tiny import tiny_checkpoint_dir, tiny_prompt
from vllm_omni.diffusion.models import loader
from vllm_omni.diffusion.models.lingbot_world.text import TextEncoder, padded
from vllm_omni.diffusion.models.lingbot_world.tokenizer import TEXT_TOKENS
from vllm_omni.errors import CheckpointError

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def text():
    return TextEncoder.load(tiny_checkpoint_dir(), dtype=torch.float32, device=CPU)


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("tokens", [1, 2, 511, 512])
def test_rows_of_padding_are_zero(text, tokens):
    ids = (*(4 + index % 100 for index in range(tokens - 1)), 1)
    rows, mask = padded(ids)
    embedded = text.embed(ids)
    assert rows.shape == mask.shape == (1, TEXT_TOKENS)
    assert rows[0].tolist() == [*ids] + [0] * (TEXT_TOKENS - tokens)
    assert mask[0].tolist() == [1] * tokens + [0] * (TEXT_TOKENS - tokens)
    assert embedded.shape == (TEXT_TOKENS, text.encoder.config.d_model)
    assert embedded[:tokens].abs().sum(-1).min() > 0
    assert not embedded[tokens:].any()


def test_an_encoder_is_freed_with_its_last_user(text):
    """At once: the next model may need its memory before cycles are collected."""
    passing = TextEncoder(text.encoder)
    passing.embed((4, 1))
    left = weakref.ref(passing)
    gc.disable()
    try:
        del passing
        assert left() is None
    finally:
        gc.enable()


def test_rows_are_those_of_the_library(text):
    """Bitwise: the encoder's own last hidden state, masked."""
    encoder = UMT5EncoderModel.from_pretrained(tiny_checkpoint_dir() / "text_encoder")
    tokens = tiny_prompt("a castle in the wind").ids
    ids, mask = padded(tokens)
    hidden = encoder(ids, attention_mask=mask).last_hidden_state[0]
    assert torch.equal(text.embed(tokens), hidden * mask[0][:, None])
    assert hidden[int(mask.sum()) :].abs().max() > 0  # padding rows are not zero by themselves


def test_the_last_four_prompts_are_kept(text):
    fresh = TextEncoder(text.encoder)
    one, two, three, four, five = [(token, 1) for token in range(4, 9)]
    calls = []
    hook = text.encoder.register_forward_pre_hook(lambda *_: calls.append(1))
    first = fresh.embed(one)
    for prompt in (two, three, four, one):
        fresh.embed(prompt)
    assert len(calls) == 4
    assert fresh.embed(one) is first
    fresh.embed(five)  # pushes out ``two``, the one that was not used for longest
    fresh.embed(two)
    assert len(calls) == 6
    hook.remove()


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no text_encoder folder"):
        TextEncoder.load(tmp_path, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("change", ["missing", "unexpected"])
@pytest.mark.filterwarnings("ignore")
def test_weights_that_do_not_fit_are_refused(tmp_path, change):
    """The library would fill a missing tensor with noise and go on."""
    shutil.copytree(tiny_checkpoint_dir(), tmp_path / "model")
    path = tmp_path / "model" / "text_encoder" / "model.safetensors"
    weights = load_file(path)
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    if change == "missing":
        del weights[name]
    else:
        name = "encoder.block.9.extra.weight"
        weights[name] = torch.zeros(1)
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        TextEncoder.load(tmp_path / "model", dtype=torch.float32, device=CPU)


def test_a_long_load_of_the_encoder_tells_that_it_goes_on(monkeypatch):
    told, load = threading.Semaphore(0), UMT5EncoderModel.from_pretrained

    def slow_load(*args, **kwargs):
        assert all(told.acquire(timeout=10) for _ in range(3)), "nothing was told"
        return load(*args, **kwargs)

    monkeypatch.setattr(loader, "_TOLD_EVERY_S", 0.01)
    monkeypatch.setattr(UMT5EncoderModel, "from_pretrained", slow_load)
    with loader.loading_told(told.release):
        TextEncoder.load(tiny_checkpoint_dir(), dtype=torch.float32, device=CPU)
        assert "vllm-omni-loading" not in {thread.name for thread in threading.enumerate()}
