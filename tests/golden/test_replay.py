"""Golden arrays are reproduced, and the replay tells a wrong array from a right one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.golden.archive import Archive
from tests.golden.checks import FULL_SETS, LONG_SETS, assert_replayed, rows_of, threads
from tests.golden.replay import main
from tests.golden.report import FAIL, INPUT, PASS, compare_arrays
from tests.helpers.dense_oracle import DenseOracle, visible_history
from tests.helpers.golden import SUBSET_DIR, golden_dir, requires_golden
from tests.helpers.model_builders import SMALL_MODEL, weights_of
from vllm_omni.diffusion.models.lingbot_world.chunk import DmdSchedule

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

__all__ = ["threads"]

SUBSET = Archive(SUBSET_DIR)


@pytest.mark.parametrize("name", SUBSET.names)
def test_subset(name):
    """Under the manifests' tolerances."""
    assert_replayed(SUBSET, name)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize("name", [name for name in SUBSET.names if name not in LONG_SETS])
def test_subset_at_two_threads(name):
    assert_replayed(SUBSET, name)


@requires_golden
@pytest.mark.parametrize("name", [name for name in FULL_SETS if name not in LONG_SETS])
def test_full_sets(name):
    """Where all arrays are given; the two long ones, and two threads, are tests of a release."""
    assert_replayed(Archive(golden_dir()), name)


def test_subset_is_small():
    files = [path for path in SUBSET_DIR.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 3 * 10**6


# --- sets of other models, made by the dense oracle ------------------------------------------

VARIANTS = {
    "sink4_win8": {"sink_size": 4, "sliding_window_num_frames": 8},
    "sink5_win12": {"sink_size": 5, "sliding_window_num_frames": 12},
}
WIDE = replace(SMALL_MODEL, attention_head_dim=32)
CHUNKS, SEED, TOLERANCE = 6, 5, {"rtol": 1e-4, "atol": 1e-4}


def oracle_rollout(inputs: dict, sizes: dict, shift: float) -> dict[str, torch.Tensor]:
    """Arrays of one rollout by the oracle, named as golden sets name them."""
    window = {"sink": sizes["sink_size"], "window": sizes["sliding_window_num_frames"]}
    oracle = DenseOracle(weights_of(WIDE), heads=2, **window)
    generator, schedule = torch.Generator().manual_seed(SEED), DmdSchedule.with_shift(shift)
    made = {}
    for chunk in range(CHUNKS):
        frames, start = slice(3 * chunk, 3 * chunk + 3), 3 * chunk
        condition = inputs["condition"][0, :, frames].double()
        around = inputs["camera"][0, :, frames], inputs["prompt_embeds"][0]
        x = torch.randn(1, 16, 3, 4, 6, generator=generator)[0].double()
        for step, sigma in enumerate(schedule.sigmas):
            flow = oracle.forward(
                torch.cat((x, condition)), schedule.timesteps[step], *around, start=start
            )
            made[f"chunk{chunk}.step{step}.flow"] = flow
            x = x - sigma * flow
            if step < 3:
                noise = torch.randn(1, 16, 3, 4, 6, generator=generator)[0].double()
                x = (1 - schedule.sigmas[step + 1]) * x + schedule.sigmas[step + 1] * noise
        clean = torch.cat((x, condition))
        made[f"chunk{chunk}.x0"] = x
        made[f"chunk{chunk}.commit.flow"] = oracle.forward(
            clean, 0.0, *around, start=start, commit=True
        )
    last = 3 * CHUNKS - 3
    kept = [*visible_history(last, frames=3, **window), *range(last, last + 3)]
    made["stored"] = torch.cat([oracle.committed[1][frame][0] for frame in kept])
    return {name: array[None].float().contiguous() for name, array in made.items()}


@pytest.fixture(scope="module")
def variant_set(tmp_path_factory) -> Path:
    """A directory with one set: shared weights and inputs, two windows, one rank's keys."""
    root = tmp_path_factory.mktemp("golden")
    (root / "arrays").mkdir()
    generator = torch.Generator().manual_seed(9)
    inputs = {
        "condition": torch.randn(1, 20, 3 * CHUNKS, 4, 6, generator=generator),
        "camera": torch.randn(1, 384, 3 * CHUNKS, 4, 6, generator=generator),
        "prompt_embeds": torch.randn(1, 20, WIDE.text_dim, generator=generator),
    }
    inputs |= {f"weights.{name}": weight for name, weight in weights_of(WIDE).items()}
    entries = {name: {"role": "input", "dtype": "float32"} for name in inputs}
    arrays = dict(inputs)
    for variant, sizes in VARIANTS.items():
        made = oracle_rollout(inputs, sizes, shift=3.0)
        stored = made.pop("stored")
        arrays |= {f"{variant}.{name}": array for name, array in made.items()}
        for rank in range(2):  # the head group that each of two ranks holds
            name = f"{variant}.rank{rank}.kv.chunk{CHUNKS - 1}.layer1.key"
            arrays[name] = stored[:, :, rank : rank + 1].contiguous()
    entries |= {
        name: {"role": "output", "dtype": "float32", **TOLERANCE}
        for name in arrays
        if name not in inputs
    }
    fields = ("num_attention_heads", "attention_head_dim", "text_dim", "freq_dim", "ffn_dim",
              "num_layers")  # fmt: skip
    base = {name: getattr(WIDE, name) for name in fields}
    facts = {"base_config": base, "variants": VARIANTS, "seed": SEED, "flow_shift": 3.0}
    save_file(arrays, root / "arrays" / "variants.safetensors")
    (root / "arrays" / "variants.json").write_text(json.dumps({"facts": facts, "arrays": entries}))
    return root


def test_variants_bring_weights_and_windows(variant_set):
    """Up to rounding against float64: other heads, sinks and windows that are no whole chunks."""
    rows = rows_of(Archive(variant_set), "variants")
    assert [str(row) for row in rows if row.status == FAIL] == []
    assert sum(row.status == PASS for row in rows) == 2 * (CHUNKS * 6 + 2)
    assert {row.name for row in rows if row.status == INPUT} >= {"condition", "camera"}


def test_a_wrong_window_is_told(variant_set, tmp_path):
    """One rolling frame less changes what the fourth chunk and later ones see, and fails."""
    arrays = tmp_path / "arrays"
    arrays.mkdir()
    source = variant_set / "arrays"
    manifest = json.loads((source / "variants.json").read_text())
    manifest["facts"]["variants"]["sink4_win8"]["sliding_window_num_frames"] = 7
    (arrays / "variants.json").write_text(json.dumps(manifest))
    (arrays / "variants.safetensors").symlink_to(source / "variants.safetensors")
    failed = {row.name for row in rows_of(Archive(tmp_path), "variants") if row.status == FAIL}
    assert "sink4_win8.chunk2.step0.flow" in failed
    assert not any(
        name.startswith(("sink5", "sink4_win8.chunk0", "sink4_win8.chunk1")) for name in failed
    )


# --- the tool --------------------------------------------------------------------------------


@pytest.fixture
def one_set(tmp_path) -> Path:
    """A copy of the schedule's set, to be spoilt."""
    (tmp_path / "arrays").mkdir()
    for suffix in ("json", "safetensors"):
        source = SUBSET_DIR / "arrays" / f"d_schedule.{suffix}"
        (tmp_path / "arrays" / source.name).write_bytes(source.read_bytes())
    return tmp_path


def respoil(root: Path, **changed: torch.Tensor | None) -> None:
    """Replace arrays of a set, or add them; the manifest learns new names."""
    path, manifest_path = (root / "arrays" / f"d_schedule.{s}" for s in ("safetensors", "json"))
    arrays, manifest = load_file(path), json.loads(manifest_path.read_text())
    for name, array in changed.items():
        arrays[name] = array
        manifest["arrays"].setdefault(name, {"role": "output", "dtype": "float64"})
    save_file(arrays, path)
    manifest_path.write_text(json.dumps(manifest))


def test_a_good_set_exits_with_zero(one_set, capsys):
    assert main([str(one_set)]) == 0
    out = capsys.readouterr().out
    assert "pass  shift5.sigmas" in out
    assert "22 pass" in out


def test_one_wrong_value_exits_with_one(one_set, capsys):
    sigmas = load_file(one_set / "arrays" / "d_schedule.safetensors")["shift5.sigmas"]
    sigmas[2] += 1e-12
    respoil(one_set, **{"shift5.sigmas": sigmas})
    assert main([str(one_set), "--set", "d_schedule", "--quiet"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  shift5.sigmas" in out
    assert "1 of 4 values out of tolerance" in out
    assert "1 FAIL, 21 pass" in out


def test_an_array_that_nothing_makes_fails(one_set, capsys):
    respoil(one_set, unheard_of=torch.zeros(2))
    assert main([str(one_set)]) == 1
    assert "nothing in the replay makes an array of this name" in capsys.readouterr().out


def test_an_unknown_set_is_an_error(one_set, capsys):
    with pytest.raises(SystemExit):
        main([str(one_set), "--set", "z"])
    assert "no such sets: ['z']" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("made", "status"),
    [
        (torch.ones(1, 2, 3), PASS),
        (torch.ones(2, 3), PASS),
        (torch.full((2, 3), 1.0005), PASS),
        (torch.full((2, 3), 1.01), FAIL),
        (torch.full((2, 3), torch.nan), FAIL),
        (torch.ones(3, 2), FAIL),
        (torch.ones(2, 3, dtype=torch.float64), FAIL),
        (torch.ones(2, 3, dtype=torch.bfloat16), PASS),
    ],
)
def test_verdicts(made, status):
    entry = {"rtol": 0.0, "atol": 1e-3}
    assert compare_arrays("x", made, torch.ones(1, 2, 3), entry).status == status
