"""Prompts to token ids, against transformers' own tokenizer, which reads every prompt whole."""

import shutil
from functools import cache

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.helpers.tiny import tiny_prompt
from vllm_omni.diffusion.models.lingbot_world.tokenizer import TEXT_TOKENS, load_tokenizer
from vllm_omni.errors import CheckpointError
from vllm_omni.tools.tiny_checkpoint import TEMPLATE_DIR

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

PROMPTS = {
    "a word": "castle",
    "nothing known": "\u0416\u0416 \u2603",
    "special": "a <pad> b </s> c <unk>",
    "words": "road " * 6553,
    "no spaces": "世界" * 16384,
    "one word": "a" * 32768,
    "one word first": "x" * 5000 + " " + "y z " * 5000,
    "mixed": "".join(chr(97 + index * 7 % 26) if index % 6 else " " for index in range(32768)),
    "normal forms": "🙂 é ﬁ ½ " * 3000,
    "nbsp": "word\u00a0without\u00a0spaces\u00a0" * 1500,
    "steps": " ".join("a" * (index % 40 + 1) for index in range(1500)),
}


@cache
def library():
    return AutoTokenizer.from_pretrained(TEMPLATE_DIR / "tokenizer", local_files_only=True)


def prompt_of(tokens):
    """A prompt of exactly so many tokens, the end token included."""
    words = ["the", "of", "a", "castle", "jungle", "wind", "rider"] * tokens
    prompt = ""
    for word in words:
        longer = f"{prompt} {word}".strip()
        if len(library()(longer)["input_ids"]) > tokens:
            break
        prompt = longer
    return prompt + "." * (tokens - len(library()(prompt)["input_ids"]))


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_ids_are_those_of_the_whole_prompt(prompt):
    """Equal: of a long prompt only the beginning is read."""
    whole = library()(prompt, max_length=TEXT_TOKENS, truncation=True)
    read = tiny_prompt(prompt)
    assert list(read.ids) == whole["input_ids"]
    assert read.text == prompt


@pytest.mark.parametrize("tokens", [1, 2, 511, 512])
def test_prompts_up_to_the_limit_are_whole(tokens, caplog):
    prompt = "" if tokens == 1 else prompt_of(tokens)
    ids = tiny_prompt(prompt).ids
    assert list(ids) == library()(prompt)["input_ids"]
    assert len(ids) == tokens
    assert "was cut" not in caplog.text


@pytest.mark.parametrize("tokens", [513, 5000])
def test_longer_prompts_are_cut_and_the_log_says_so(tokens, caplog):
    prompt = "castle " * (tokens // 2)
    assert len(library()(prompt)["input_ids"]) >= tokens
    ids = tiny_prompt(prompt).ids
    assert "a prompt was cut to 512 tokens" in caplog.text
    assert len(ids) == TEXT_TOKENS
    assert ids[-1] == library().eos_token_id
    assert tiny_prompt(prompt + "and something else").ids == ids


class Counted:
    """A library that counts the characters that it reads."""

    def __init__(self, library):
        self.library, self.read = library, 0

    def encode(self, text):
        self.read += len(text)
        return self.library.encode(text)


@pytest.mark.parametrize(
    "prompt",
    ["road " * 6553, "island" * 5461, "x " + "island" * 5461],
    ids=["words", "none", "one"],
)
def test_only_the_beginning_of_a_long_prompt_is_tokenized(prompt, monkeypatch):
    tokenize = load_tokenizer(TEMPLATE_DIR)
    counted = Counted(tokenize._library)
    monkeypatch.setattr(tokenize, "_library", counted)
    assert tokenize(prompt) == tiny_prompt(prompt)
    assert counted.read <= 8 * TEXT_TOKENS


def test_a_file_that_pads_and_cuts_by_itself_changes_nothing(tmp_path):
    shutil.copytree(TEMPLATE_DIR / "tokenizer", tmp_path / "tokenizer")
    file = tmp_path / "tokenizer" / "tokenizer.json"
    other = Tokenizer.from_file(str(file))
    other.enable_padding(length=700)
    other.enable_truncation(7, direction="left")
    other.save(str(file))
    prompt = "castle " * 700
    assert load_tokenizer(tmp_path)(prompt) == tiny_prompt(prompt)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"no tokenizer/tokenizer\.json"),
        ("{", r"tokenizer/tokenizer\.json is not JSON"),
        ("{}", r"tokenizer/tokenizer\.json cannot be used"),
        ('{"version": "1.0", "model": {"type": "Unigram", "vocab": 5}}', "cannot be used"),
        (
            '{"version": "1.0", "model": {"type": "Unigram", "unk_id": null, "vocab": [["a", 0]]}}',
            "cannot be used: Encountered an unknown token",
        ),
        ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content, said):
    (tmp_path / "tokenizer").mkdir()
    if content is not None:
        (tmp_path / "tokenizer" / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=said) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
