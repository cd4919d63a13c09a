"""Golden arrays are reproduced, and the replay tells a wrong array from a right one."""

import json
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
from tests.helpers.golden import SUBSET_DIR, golden_dir, requires_golden
from tests.helpers.oracle_set import CHUNKS, FORWARDS, write_oracle_set

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

__all__ = ["threads"]

SUBSET = Archive(SUBSET_DIR)


@pytest.mark.parametrize("name", SUBSET.names)
def test_subset(name):
    """Under the manifests' tolerances."""
    assert_replayed(SUBSET, name)


@pytest.mark.advanced_model
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize("name", [name for name in SUBSET.names if name not in LONG_SETS])
def test_subset_at_two_threads(name):
    """Recipes of one rank; ranks always run on one thread each."""
    recipes = [recipe for recipe in SUBSET.recipes(name) if recipe.get("ranks", 1) == 1]
    rows = [row for recipe in recipes for row in rows_of_recipe(SUBSET, name, recipe)]
    assert [str(row) for row in rows if row.status != PASS] == []
    assert rows


@requires_golden
@pytest.mark.parametrize("name", [name for name in FULL_SETS if name not in LONG_SETS])
def test_full_sets(name):
    """Where all arrays are given; the two long ones, and two threads, are tests of a release."""
    assert_replayed(Archive(golden_dir()), name)


@pytest.mark.advanced_model
@requires_golden
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("name", FULL_SETS)
def test_full_sets_whole(name):
    """Under the manifests' tolerances, the long ones too, at one and at two threads."""
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


@pytest.fixture(scope="module")
def variant_set(tmp_path_factory) -> Path:
    return write_oracle_set(tmp_path_factory.mktemp("golden"))


def test_variants_bring_weights_and_windows(variant_set):
    """Up to rounding against float64: other heads, sinks, windows, and two ranks."""
    rows = rows_of(Archive(variant_set), "variants")
    assert [str(row) for row in rows if row.status == FAIL] == []
    assert sum(row.status == PASS for row in rows) == 2 * (CHUNKS * 6 * 2 + 2) + FORWARDS
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
