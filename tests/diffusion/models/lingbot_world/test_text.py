"""Prompts: padding, the length limit, the cache, and checkpoints that do not fit."""

import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import UMT5EncoderModel

from tests.helpers.tiny import tiny_checkpoint_dir
from vllm_omni.diffusion.models import loader
from vllm_omni.diffusion.models.lingbot_world.text import TEXT_TOKENS, TextEncoder
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


def prompt_of(text, tokens):
    """A prompt of exactly so many tokens, the end token included."""
    words = ["the", "of", "a", "castle", "jungle", "wind", "rider"] * tokens
    prompt = ""
    for word in words:
        longer = f"{prompt} {word}".strip()
        if len(text.tokenizer(longer)["input_ids"]) > tokens:
            break
        prompt = longer
    while len(text.tokenizer(prompt)["input_ids"]) < tokens:
        prompt += "."
    assert len(text.tokenizer(prompt)["input_ids"]) == tokens
    return prompt


@pytest.mark.parametrize("tokens", [1, 2, 511, 512])
def test_prompts_up_to_the_limit_are_padded_with_zero_rows(text, tokens, caplog):
    prompt = "" if tokens == 1 else prompt_of(text, tokens)
    ids, mask = text.tokenize(prompt)
    embedded = text.embed(prompt)
    assert ids.shape == mask.shape == (1, TEXT_TOKENS)
    assert mask[0].tolist() == [1] * tokens + [0] * (TEXT_TOKENS - tokens)
    assert embedded.shape == (TEXT_TOKENS, text.encoder.config.d_model)
    assert embedded[:tokens].abs().sum(-1).min() > 0
    assert not embedded[tokens:].any()
    assert "was cut" not in caplog.text


@pytest.mark.parametrize("tokens", [513, 5000])
def test_longer_prompts_are_cut_and_the_log_says_so(text, tokens, caplog):
    """Bitwise: what stands past the limit counts for nothing."""
    prompt = "castle " * (tokens // 2)
    assert len(text.tokenizer(prompt)["input_ids"]) >= tokens
    embedded = text.embed(prompt)
    assert "a prompt was cut to 512 tokens" in caplog.text
    assert torch.equal(embedded, text.embed(prompt + "and something else"))
    assert embedded.abs().sum(-1).min() > 0
    ids, _ = text.tokenize(prompt)
    assert ids[0, -1] == text.tokenizer.eos_token_id


def test_rows_are_those_of_the_library(text):
    """Bitwise: the encoder's own last hidden state, masked."""
    encoder = UMT5EncoderModel.from_pretrained(tiny_checkpoint_dir() / "text_encoder")
    ids, mask = text.tokenize("a castle in the wind")
    hidden = encoder(ids, attention_mask=mask).last_hidden_state[0]
    assert torch.equal(text.embed("a castle in the wind"), hidden * mask[0][:, None])
    assert hidden[int(mask.sum()) :].abs().max() > 0  # padding rows are not zero by themselves


def test_the_last_four_prompts_are_kept(text):
    fresh = TextEncoder(text.tokenizer, text.encoder)
    calls = []
    hook = text.encoder.register_forward_pre_hook(lambda *_: calls.append(1))
    first = fresh.embed("one")
    for prompt in ("two", "three", "four", "one"):
        fresh.embed(prompt)
    assert len(calls) == 4
    assert fresh.embed("one") is first
    fresh.embed("five")  # pushes out "two", the one that was not used for longest
    fresh.embed("two")
    assert len(calls) == 6
    hook.remove()


@pytest.mark.parametrize(
    "prompt",
    [
        "road " * 6553,
        "世界" * 16384,
        "a" * 32768,
        "x" * 5000 + " " + "y z " * 5000,
        "".join(chr(97 + index * 7 % 26) if index % 6 else " " for index in range(32768)),
        "🙂 é ﬁ ½ " * 3000,
        "word\u00a0without\u00a0spaces\u00a0" * 1500,
        " ".join("a" * (index % 40 + 1) for index in range(1500)),
    ],
    ids=[
        "words",
        "no spaces",
        "one word",
        "one word first",
        "mixed",
        "normal forms",
        "nbsp",
        "steps",
    ],
)
def test_a_beginning_gives_the_tokens_of_the_whole(text, prompt):
    """Bitwise: against the tokenizer alone, which reads everything."""
    ids, mask = text.tokenize(prompt)
    whole = text.tokenizer(
        [prompt], padding="max_length", padding_side="right", max_length=TEXT_TOKENS,
        truncation=True, return_tensors="pt",
    )  # fmt: skip
    assert torch.equal(ids, whole["input_ids"])
    assert torch.equal(mask, whole["attention_mask"])


@pytest.mark.parametrize(
    "prompt",
    ["road " * 6553, "island" * 5461, "x " + "island" * 5461],
    ids=["words", "none", "one"],
)
def test_only_the_beginning_of_a_long_prompt_is_tokenized(text, monkeypatch, prompt):
    read = []
    rows = TextEncoder._rows

    def recorded(self, head):
        read.append(len(head))
        return rows(self, head)

    monkeypatch.setattr(TextEncoder, "_rows", recorded)
    text.tokenize(prompt)
    assert sum(read) <= 8 * TEXT_TOKENS


@pytest.mark.parametrize("folder", ["tokenizer", "text_encoder"])
def test_a_missing_folder_is_named(tmp_path, folder):
    shutil.copytree(tiny_checkpoint_dir(), tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / folder)
    with pytest.raises(CheckpointError, match=f"no {folder} folder"):
        TextEncoder.load(tmp_path / "model", dtype=torch.float32, device=CPU)


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
