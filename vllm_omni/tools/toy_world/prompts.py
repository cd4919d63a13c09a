"""Prompts of the place and the text encoder that tells its lights apart.

The encoder is the tiny checkpoint's random UMT5 with a longer vocabulary: words that name a light
are one token each, upper or lower case, and its layers are turned down, so that a token's row stays
close to its own embedding whatever sentence it stands in.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from vllm_omni.diffusion.models.lingbot_world.text import TextEncoder
from vllm_omni.diffusion.models.lingbot_world.tokenizer import TEXT_TOKENS, load_tokenizer
from vllm_omni.tools.tiny_checkpoint import (
    TEMPLATE_DIR,
    draw,
    scale_text_encoder,
    text_encoder_shapes,
    write_weights,
)

WORDS = (
    ("day", "noon", "morning", "sunny", "daylight", "bright", "sunshine"),
    ("dusk", "sunset", "evening", "twilight", "sundown", "orange"),
    ("night", "midnight", "moonlight", "dark", "moonlit", "stars"),
)
"""Words that name each light, in the order of ``island.LIGHTS``."""
_SENTENCES = (
    "{}",
    "It is {}.",
    "A small island, {}.",
    "A {} scene on a small island with coloured towers.",
    "The island at {}.",
    "Walk through the world. {}. The camera glides slowly forward.",
    "{} over a quiet place by the sea.",
)
NEUTRAL = (
    "A small island with coloured towers.",
    "A world.",
    "Walk through the world.",
    "A quiet place by the sea.",
    "The camera glides slowly forward.",
    "A road.",
    "A lawn, a tree and a few towers.",
)
"""Prompts that name no light: the place stays as it is."""
PROMPTS = tuple(
    (light, sentence.format(word))
    for light, words in enumerate(WORDS)
    for word in words
    for sentence in _SENTENCES
) + tuple((len(WORDS), text) for text in NEUTRAL)
"""Every prompt of the training, with its light (the number of lights for none)."""
_TURNED_DOWN = 0.25
_SEED = 97


def write_text_parts(directory: Path) -> None:
    """Write the folders ``tokenizer`` and ``text_encoder`` of a checkpoint."""
    for folder in ("tokenizer", "text_encoder"):
        (directory / folder).mkdir(parents=True, exist_ok=True)
    source = TEMPLATE_DIR
    tokenizer = json.loads((source / "tokenizer" / "tokenizer.json").read_text())
    lower = {"type": "Lowercase"}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, lower]}
    vocabulary = tokenizer["model"]["vocab"]
    # A piece of score 0 wins over any two pieces, whose scores are logarithms of shares.
    vocabulary += [["\u2581" + word, 0.0] for words in WORDS for word in words]
    target = directory / "tokenizer"
    (target / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1))
    settings = (source / "tokenizer" / "tokenizer_config.json").read_text()
    (target / "tokenizer_config.json").write_text(settings)
    config = json.loads((source / "text_encoder" / "config.json").read_text())
    config["vocab_size"] = len(vocabulary)
    target = directory / "text_encoder"
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = draw(text_encoder_shapes(config), seed=_SEED, scale=scale_text_encoder)
    for name, weight in weights.items():
        if name.endswith(("SelfAttention.o.weight", "wo.weight")):
            weight.mul_(_TURNED_DOWN)
    half = {name: weight.bfloat16() for name, weight in weights.items()}
    write_weights(target / "model.safetensors", half)


def embed_prompts(
    directory: Path, prompts: Sequence[str]
) -> tuple[Float[Tensor, "prompts rows text_dim"], Float[Tensor, "prompts rows"]]:
    """Embed prompts with a checkpoint's own encoder.

    The transformer attends to all 512 rows, and those of padding are all zero: here they are one
    row, and the second result is the logarithm of how often each row counts.
    """
    tokenize = load_tokenizer(directory)
    encoder = TextEncoder.load(directory, dtype=torch.float32, device=torch.device("cpu"))
    kept = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens = tokenize(prompt).ids
            kept.append(encoder.embed(tokens)[: len(tokens)].clone())
    longest = max(len(rows) for rows in kept) + 1
    out = torch.zeros(len(kept), longest, kept[0].shape[1])
    counts = torch.full((len(kept), longest), -1e4)
    for index, rows in enumerate(kept):
        out[index, : len(rows)] = rows
        counts[index, : len(rows)] = 0.0
        counts[index, len(rows)] = math.log(TEXT_TOKENS - len(rows))
    return out, counts
