"""Weights from shards: what is read, and every way in which files can fail to fit."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.model_builders import (
    CPU,
    SMALL_MODEL,
    ModelRollout,
    small_transformer,
    transformer_parts,
    weights_of,
    write_transformer,
)
from vllm_omni.diffusion.layers.weights import weight_targets
from vllm_omni.diffusion.models import loader
from vllm_omni.diffusion.models.checkpoint_files import DIFFUSERS, weight_files
from vllm_omni.diffusion.models.lingbot_world.load import load_transformer
from vllm_omni.diffusion.models.loader import LoadProgress, load_weights, loading_told
from vllm_omni.errors import CheckpointError

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path):
    return write_transformer(tmp_path, SMALL_MODEL, weights_of(SMALL_MODEL))


def shard(folder, pieces=3):
    """Turn a single weight file into shards with an index."""
    weights = load_file(folder / FILE)
    (folder / FILE).unlink()
    names, weight_map = sorted(weights), {}
    for piece in range(pieces):
        file = f"diffusion_pytorch_model-{piece + 1:05}-of-{pieces:05}.safetensors"
        part = {name: weights[name] for name in names[piece::pieces]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{FILE}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def load(folder, config=SMALL_MODEL, **options):
    return load_transformer(folder.parent, transformer_parts(config, **options), CPU)


def refused(folder, config=SMALL_MODEL):
    with pytest.raises(CheckpointError) as caught:
        load(folder, config)
    return str(caught.value)


@pytest.mark.parametrize("sharded", [False, True])
def test_loaded_model_equals_the_drawn_one(folder, sharded):
    """Bitwise, from one file and from shards."""
    if sharded:
        shard(folder)
    with torch.inference_mode():
        made = ModelRollout(load(folder)).probe(0)
        assert torch.equal(made, ModelRollout(small_transformer()).probe(0))


def test_values_are_rounded_to_the_models_dtype(folder):
    model = load(folder, dtype=torch.bfloat16)
    weight = weights_of(SMALL_MODEL)["head.head.weight"]
    assert torch.equal(model.head.head.weight, weight.bfloat16())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_all_problems_come_in_one_error(folder):
    weights = load_file(folder / FILE)
    weights["blocks.0.norm4.weight"] = weights.pop("blocks.0.norm3.weight")
    weights["head.modulation"] = torch.zeros(1, 3, SMALL_MODEL.dim)
    del weights["blocks.1.self_attn.k.bias"]
    save_file(weights, folder / FILE)
    text = refused(folder)
    assert "2 missing: blocks.0.norm3.weight, blocks.1.self_attn.k.bias" in text
    assert "1 unexpected: blocks.0.norm4.weight" in text
    assert "1 mis-shaped: head.modulation (expected [1, 2, 32], got [1, 3, 32])" in text


def test_problems_are_found_before_any_value_is_read(folder):
    """Bitwise: a refused checkpoint leaves the parameters as they were."""
    weights = load_file(folder / FILE)
    weights["extra"] = torch.zeros(1)
    save_file(weights, folder / FILE)
    model = small_transformer()
    before = {name: p.clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.add_(1)
    with pytest.raises(CheckpointError, match="1 unexpected: extra"):
        load_weights(folder, weight_targets(model))
    assert all(torch.equal(p, before[name] + 1) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": null}', '{"weight_map": ["a file"]}', "\xff"]
)
def test_an_index_that_is_none_is_named(folder, text):
    index = folder / f"{FILE}.index.json"
    index.write_text(text, encoding="latin1")
    said = refused(folder)
    assert f"transformer/{index.name} " in said
    assert "must hold " in said or "is not JSON" in said


def test_a_long_list_is_cut(folder):
    save_file({"only": torch.zeros(1)}, folder / FILE)
    text = refused(folder)
    total = len(weights_of(SMALL_MODEL))
    assert f"{total} missing: " in text
    assert f" and {total - 20} more" in text


def test_a_checkpoint_of_another_size_is_mis_shaped(folder):
    assert "mis-shaped" in refused(folder, replace(SMALL_MODEL, ffn_dim=128))


def test_a_checkpoint_with_more_layers_has_unexpected_tensors(folder):
    text = refused(folder, replace(SMALL_MODEL, num_layers=1))
    assert "unexpected: blocks.1." in text


def test_missing_files_are_named(folder):
    shard(folder)
    (folder / "diffusion_pytorch_model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="transformer/diffusion_pytorch_model-00002"):
        weight_files(folder, DIFFUSERS)
    (folder / f"{FILE}.index.json").unlink()
    with pytest.raises(CheckpointError, match=f"the checkpoint has no transformer/{FILE}"):
        weight_files(folder, DIFFUSERS)


@pytest.mark.parametrize("keep", [0, 4, 100, -64])
def test_a_damaged_file_is_an_error_that_names_it(folder, keep):
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[:keep])
    assert FILE in refused(folder)


@pytest.mark.parametrize(("rank", "files"), [(None, 3), (0, 3), (1, 0)])
def test_the_root_rank_logs_each_file(folder, caplog, monkeypatch, rank, files):
    shard(folder)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: rank is not None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    caplog.set_level("INFO", "vllm_omni")
    load_weights(folder, weight_targets(small_transformer()))
    assert [record.getMessage() for record in caplog.records] == [
        f"loading transformer: file {number} of 3" for number in range(1, files + 1)
    ]


def test_a_long_load_tells_that_it_goes_on_and_the_root_logs_rate_and_time_left(
    monkeypatch, caplog
):
    seconds, told = iter([0.0, 0.5, 2.0, 20.0, 21.5]), []
    monkeypatch.setattr(loader.time, "monotonic", lambda: next(seconds))
    with caplog.at_level("INFO", "vllm_omni"), loading_told(lambda: told.append(len(told))):
        progress = LoadProgress("transformer", 60_000_000_000)
        for _ in range(4):
            progress.add(10_000_000_000)
    assert told == [0, 1, 2]
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == "loading transformer: 30.0 of 60.0 GB at 1.50 GB/s, about 20 s to go"


def test_nothing_is_told_outside_of_the_block(monkeypatch):
    seconds = iter([0.0, 5.0])
    monkeypatch.setattr(loader.time, "monotonic", lambda: next(seconds))
    LoadProgress("vae", 10).add(10)
