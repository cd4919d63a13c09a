"""Golden arrays are reproduced, and the replay tells a wrong array from a right one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.golden.archive import KEPT_RECIPES, Archive, RecipeError
from tests.golden.checks import (
    FULL_SETS,
    LONG_SETS,
    assert_replayed,
    rows_of,
    rows_of_recipe,
    threads,
)
from tests.golden.recipe import Run
from tests.golden.replay import main
from tests.golden.report import FAIL, INPUT, PASS, Target, compare_arrays, judge
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


@pytest.fixture
def one_set(tmp_path) -> Path:
    """A copy of the schedule's set, to be spoilt."""
    (tmp_path / "arrays").mkdir()
    for suffix in ("json", "safetensors"):
        source = SUBSET_DIR / "arrays" / f"d_schedule.{suffix}"
        (tmp_path / "arrays" / source.name).write_bytes(source.read_bytes())
    return tmp_path


# --- recipes -----------------------------------------------------------------------------------


@pytest.fixture
def recipes_of(one_set):
    """Change the recipes of the schedule's set, replay it, and give the rows by name."""

    def replayed(change) -> dict[str, list]:
        path = one_set / "arrays" / "d_schedule.json"
        manifest = json.loads(path.read_text())
        change(manifest["recipes"])
        path.write_text(json.dumps(manifest))
        rows: dict[str, list] = {}
        for row in rows_of(Archive(one_set), "d_schedule"):
            rows.setdefault(row.name, []).append(row)
        return rows

    return replayed


def notes(rows: dict[str, list], name: str) -> list[str]:
    return [row.note for row in rows[name] if row.status == FAIL]


def test_an_array_without_a_recipe_fails(recipes_of):
    rows = recipes_of(lambda recipes: recipes[0]["outputs"].pop("shift0.5.sigmas"))
    assert notes(rows, "shift0.5.sigmas") == ["no recipe makes this array"]
    assert sum(row.status == PASS for name in rows for row in rows[name]) == 21


def test_one_recipe_fails_alone(recipes_of):
    rows = recipes_of(lambda recipes: recipes[0].update(flow_shift="sharp"))
    for name in ("shift0.5.sigmas", "shift0.5.timesteps"):
        (note,) = notes(rows, name)
        assert "flow_shift must be a number" in note
    assert sum(row.status == PASS for name in rows for row in rows[name]) == 20


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"op": "guess"}, "there is no operation 'guess'"),
        ({"flow_shft": 3.0}, "has keys without a meaning: flow_shft"),
        ({"outputs": {"shift0.5.sigmas": "sigma"}}, "nothing made sigma; there are sigmas, time"),
        ({"outputs": {"shift0.5.sigma": "sigmas"}}, "has no array shift0.5.sigma"),
    ],
)
def test_what_a_recipe_must_not_say(recipes_of, change, reason):
    rows = recipes_of(lambda recipes: recipes[0].update(change))
    assert any(reason in row.note for name in rows for row in rows[name] if row.status == FAIL)


@pytest.mark.parametrize("key", ["seed", "flow_shift", "dtype", "ranks", "chunks", "inputs"])
def test_a_rollout_has_no_defaults(key):
    (recipe,) = [r for r in SUBSET.recipes("a_transformer_direct") if r.get("ranks") == 1]
    spoilt = {name: value for name, value in recipe.items() if name != key}
    rows = list(rows_of_recipe(SUBSET, "a_transformer_direct", spoilt))
    assert {row.name for row in rows} == set(recipe["outputs"])
    assert all(row.status == FAIL and f"says no {key}" in row.note for row in rows)


def test_kept_recipes_belong_to_their_arrays(tmp_path):
    (tmp_path / "arrays").mkdir()
    source = SUBSET_DIR / "arrays" / "d_schedule.safetensors"
    (tmp_path / "arrays" / source.name).write_bytes(source.read_bytes())
    manifest = {"arrays": {"shift1.sigmas": {"role": "output"}}, "sha256": "of something else"}
    (tmp_path / "arrays" / "d_schedule.json").write_text(json.dumps(manifest))
    assert (KEPT_RECIPES / "d_schedule.json").is_file()
    with pytest.raises(RecipeError, match="for other arrays"):
        Archive(tmp_path).recipes("d_schedule")


# --- sets of other models, made by the dense oracle ------------------------------------------

VARIANTS = {
    "pebble": {"sink_size": 4, "sliding_window_num_frames": 8},
    "heron": {"sink_size": 5, "sliding_window_num_frames": 12},
}
WIDE = replace(SMALL_MODEL, attention_head_dim=32)
CHUNKS, SEED, SHIFT, TOLERANCE = 6, 5, 3.0, {"rtol": 1e-4, "atol": 1e-4}
LAST = 3 * CHUNKS - 3


def oracle_rollout(inputs: dict, sizes: dict) -> dict[str, torch.Tensor]:
    """Results of one rollout by the oracle, named as recipes name them."""
    window = {"sink": sizes["sink_size"], "window": sizes["sliding_window_num_frames"]}
    oracle = DenseOracle(weights_of(WIDE), heads=2, **window)
    generator, schedule = torch.Generator().manual_seed(SEED), DmdSchedule.with_shift(SHIFT)
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
            made[f"flow/{chunk}/{step}"] = flow
            x = x - sigma * flow
            if step < 3:
                noise = torch.randn(1, 16, 3, 4, 6, generator=generator)[0].double()
                x = (1 - schedule.sigmas[step + 1]) * x + schedule.sigmas[step + 1] * noise
        clean = torch.cat((x, condition))
        made[f"x0/{chunk}"] = x
        made[f"commit/{chunk}"] = oracle.forward(clean, 0.0, *around, start=start, commit=True)
    kept = [*visible_history(LAST, frames=3, **window), *range(LAST, LAST + 3)]
    stored = torch.cat([oracle.committed[1][frame][0] for frame in kept])
    for rank in range(2):  # the head that each of two ranks holds
        made[f"key/{CHUNKS - 1}/1/rank{rank}"] = stored[:, rank : rank + 1]
    return {name: array[None].float().contiguous() for name, array in made.items()}


def variant_recipes(made: dict[str, dict[str, str]]) -> list[dict]:
    """One and two ranks of each variant; ``made`` has results by array and variant."""
    fields = ("num_attention_heads", "attention_head_dim", "text_dim", "freq_dim", "ffn_dim",
              "num_layers")  # fmt: skip
    config = {name: getattr(WIDE, name) for name in fields}
    recipes = []
    for variant, outputs in made.items():
        for ranks in (1, 2):
            of_rank = {n: r for n, r in outputs.items() if ranks == 2 or "rank" not in r}
            recipes.append(
                {
                    "op": "rollout",
                    "model": {
                        "weights": "variants:weights.",
                        "config": config,
                        "overrides": f"variants:facts/sizes/{variant}",
                    },
                    "inputs": {
                        name: f"variants:{name}"
                        for name in ("condition", "camera", "prompt_embeds")
                    },
                    "flow_shift": SHIFT,
                    "seed": SEED,
                    "chunks": CHUNKS,
                    "ranks": ranks,
                    "dtype": "float32",
                    "outputs": of_rank,
                }
            )
    return recipes


@pytest.fixture(scope="module")
def variant_set(tmp_path_factory) -> Path:
    """A directory with one set: shared weights and inputs, two windows, names without a sense."""
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
    arrays, outputs = dict(inputs), {}
    for variant, sizes in VARIANTS.items():
        made = oracle_rollout(inputs, sizes)
        outputs[variant] = {f"{variant}{i}": result for i, result in enumerate(made)}
        arrays |= {name: made[result] for name, result in outputs[variant].items()}
    entries |= {
        name: {"role": "output", "dtype": "float32", **TOLERANCE}
        for name in arrays
        if name not in inputs
    }
    manifest = {
        "facts": {"sizes": VARIANTS},
        "arrays": entries,
        "recipes": variant_recipes(outputs),
    }
    save_file(arrays, root / "arrays" / "variants.safetensors")
    (root / "arrays" / "variants.json").write_text(json.dumps(manifest))
    return root


def test_variants_bring_weights_and_windows(variant_set):
    """Up to rounding against float64: other heads, sinks, windows, and two ranks."""
    rows = rows_of(Archive(variant_set), "variants")
    assert [str(row) for row in rows if row.status == FAIL] == []
    assert sum(row.status == PASS for row in rows) == 2 * (CHUNKS * 6 * 2 + 2)
    assert {row.name for row in rows if row.status == INPUT} >= {"condition", "camera"}
    # Pages in a row and scattered, on one rank and on each of two.
    assert {row.note for row in rows if row.status == PASS} == {"2 runs", "4 runs"}


def test_a_wrong_window_is_told(variant_set):
    """One rolling frame less changes what the third chunk and later ones see, and fails."""
    archive = Archive(variant_set)
    recipe = next(r for r in archive.recipes("variants") if "pebble0" in r["outputs"])
    recipe["model"]["overrides"] = {"sink_size": 4, "sliding_window_num_frames": 7}
    rows = list(rows_of_recipe(archive, "variants", recipe))
    failed = {recipe["outputs"][row.name] for row in rows if row.status == FAIL}
    assert "flow/2/0" in failed
    assert not any(result.split("/")[1] in {"0", "1"} for result in failed)


# --- the tool --------------------------------------------------------------------------------


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
    assert "no recipe makes this array" in capsys.readouterr().out


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
        (torch.ones(2, 3, dtype=torch.float16), FAIL),
    ],
)
def test_verdicts(made, status):
    entry = {"rtol": 0.0, "atol": 1e-3}
    assert compare_arrays("x", made, torch.ones(1, 2, 3), entry).status == status


def test_a_rounded_result_is_only_compared_with_rounded_numbers():
    made, golden = torch.ones(3, dtype=torch.bfloat16), torch.tensor([1.0, 1.0, 1.001])
    assert compare_arrays("x", made, golden, {"atol": 1.0}).status == FAIL


@pytest.mark.parametrize(("roundings", "status"), [(1, PASS), (2, FAIL)])
def test_one_rounding_too_many_is_told(roundings, status):
    """The modulation of a norm: summed in float32 and rounded once, or rounded before the sum."""
    generator = torch.Generator().manual_seed(3)
    x, gain, shift = torch.randn(3, 64, 64, generator=generator)
    exact = x * gain + shift
    golden = exact.bfloat16()
    made = golden if roundings == 1 else (x * gain).bfloat16() + shift.bfloat16()
    target = Target(golden, {"atol": 0.06, "rtol": 0.03})
    row = judge("y", "y", [Run("", {"y": made})], target, [Run("", {"y": exact})])
    assert compare_arrays("y", made, golden, target.entry).status == PASS
    assert row.status == status
