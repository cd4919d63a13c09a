"""The quality report: its figures against formulas, and a regression that it catches."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from vllm_omni.diffusion.utils.scenes import MODEL
from vllm_omni.tools.quality import FIGURES, lines, main
from vllm_omni.tools.toy_world.measure import (
    Controls,
    Interval,
    Plan,
    Walked,
    compare,
    measure_walks,
    sky_follows,
    walks_of,
)
from vllm_omni.tools.toy_world.score import (
    HELD_OUT,
    back_trial,
    chunk_scores,
    held_out_trial,
    prompt_trial,
    psnr,
    ssim,
)

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]

PLAN = Plan(walks=4, chunks=5)
RNG = np.random.default_rng(0)


def silent(_: str) -> None:
    pass


def test_psnr_of_a_constant_error():
    picture = RNG.integers(0, 200, (2, 16, 16, 3), dtype=np.uint8)
    assert psnr(picture + np.uint8(5), picture) == pytest.approx(20 * math.log10(255 / 5))


def test_ssim_of_one_window_is_the_formula_of_wang_and_others():
    a, b = RNG.integers(0, 256, (2, 1, 7, 7, 1)).repeat(3, -1).astype(np.uint8)
    x, y = a[0, ..., 0].astype(float).ravel(), b[0, ..., 0].astype(float).ravel()
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    covariance = np.cov(x, y, bias=True)
    expected = (2 * x.mean() * y.mean() + c1) * (2 * covariance[0, 1] + c2)
    expected /= (x.mean() ** 2 + y.mean() ** 2 + c1) * (covariance.trace() + c2)
    assert ssim(a, b) == pytest.approx(expected)
    assert ssim(a, a) == pytest.approx(1)


def test_the_given_picture_does_not_count_and_a_tint_is_a_drift():
    truth = [RNG.integers(0, 200, (n, 16, 16, 3), dtype=np.uint8) for n in (9, 12)]
    made = [chunk + np.uint8(10) for chunk in truth]
    made[0][0] = 0
    scores = chunk_scores(made, truth)
    assert scores["psnr"] == pytest.approx([20 * math.log10(25.5)] * 2)
    assert scores["drift"] == pytest.approx([10, 10])
    assert scores["detail"] == scores["contrast"] == pytest.approx([1, 1])


def test_detail_and_contrast_halve_with_the_distance_from_the_mean():
    truth = [RNG.integers(0, 100, (n, 16, 16, 3), dtype=np.uint8) * 2 for n in (9, 12)]
    scores = chunk_scores([chunk // 2 + np.uint8(50) for chunk in truth], truth)
    assert scores["detail"] == scores["contrast"] == pytest.approx([0.5, 0.5])


def test_a_share_has_the_interval_of_wilson():
    """Figures of Newcombe 1998, table I: 81 of 263 and 0 of 20, in percent."""
    for hits, count, low, high in ((81, 263, 25.53, 36.62), (0, 20, 0.0, 16.11)):
        interval = Interval.of_share(hits, count)
        assert interval.mean == pytest.approx(100 * hits / count)
        assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.01)


def test_long_walks_are_reported_by_twenty_chunks():
    walk = {name: [float(chunk // 20) for chunk in range(60)] for name in FIGURES}
    text = "\n".join(lines(Plan(walks=1, chunks=60), Walked([], [walk]), None))
    for span, value in (("1 to 20", 0), ("21 to 40", 1), ("41 to 60", 2), ("60 alone", 2)):
        assert f"| {span} |{f' {value}.00 [{value}.00, {value}.00] |' * 6}" in text


def test_controls_are_reported_with_their_intervals():
    controls = Controls([[True] * 18, [True] * 9 + [False] * 9], [1, 1, 3, 1], [20.0], [25.0])
    text = "\n".join(
        lines(Plan(walks=1, chunks=1), Walked([], [{key: [1.0] for key in FIGURES}]), controls)
    )
    assert "recognised in 27 of 36 chunks: 75.00 [50.00, 100.00] % over 2 starts" in text
    assert "within 1 chunks in 3 of 4: 75.00" in text
    assert "within 3 chunks in 4 of 4: 100.00" in text


@pytest.mark.parametrize(
    ("sky", "chunks"), [([9, 9, 9], 1), ([0, 9, 9], 2), ([9, 0, 9], 3), ([9, 9, 0], 4)]
)
def test_the_chunks_that_a_sky_takes_to_follow(sky, chunks):
    made = [np.full((12, 16, 16, 3), value, np.uint8) for value in sky]
    old, new = (np.full((16, 16, 3), value, np.uint8) for value in (1, 8))
    assert sky_follows(made, old=old, new=new) == chunks


def test_trials_begin_and_end_as_they_say():
    back, prompt = back_trial(0), prompt_trial(2, chunks=2)
    assert np.array_equal(back.truth[0][0], back.truth[-1][-1])
    assert not np.array_equal(back.truth[0][0], back.truth[1][-1])
    assert np.array_equal(prompt.truth[1][0], prompt.truth[1][-1])
    assert psnr(prompt.truth[0][:1], prompt.truth[1][-1:]) < 20
    first, again = held_out_trial(0, chunks=1), held_out_trial(0, chunks=1)
    assert np.array_equal(first.truth[0], again.truth[0])
    assert HELD_OUT > 10_000_000  # far beyond the seeds of any training


@pytest.fixture(scope="module")
def base() -> Walked:
    return measure_walks(MODEL, walks_of(PLAN), progress=silent)


@pytest.mark.soak
def test_a_window_that_is_a_chunk_short_is_caught_and_bfloat16_is_not(base, tmp_path):
    """The mutant sees one chunk less of the past; the loss is beyond chance with four walks."""
    mutant = tmp_path / "mutant"
    shutil.copytree(MODEL, mutant)
    config = mutant / "transformer" / "config.json"
    fields = json.loads(config.read_text())
    fields["sliding_window_num_frames"] -= 3
    config.write_text(json.dumps(fields))
    trials = walks_of(PLAN)
    short = compare("short", base, measure_walks(mutant, trials, progress=silent))
    half = measure_walks(MODEL, trials, options={"dtype": "bfloat16"}, progress=silent)
    rounded = compare("bfloat16", base, half)
    assert short.costs
    assert short.gain.mean < -0.5
    assert not rounded.costs
    assert abs(rounded.gain.mean) < 0.1
    assert rounded.alike.low > 45 > 30 > short.alike.high


def test_the_model_beats_the_frozen_picture(base):
    """Lossy: the floor of four decibels for the shipped weights, over five chunks."""
    assert base.over("psnr", 0, 5).mean > base.over("frozen", 0, 5).mean + 4


def test_the_program_prints_tables_and_writes_its_figures(tmp_path: Path, capsys):
    sizes = ["--walks", "1", "--chunks", "2", "--key-starts", "1", "--others", "1"]
    assert main([str(MODEL), *sizes, "--against", "other seed", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "1 held-out walks of 2 chunks" in text
    assert "chance is 1 in 6" in text
    report = json.loads((tmp_path / "quality.json").read_text())
    assert [len(report["walks"][0][key]) for key in FIGURES] == [2] * 6
    assert len(report["controls"]["recognised"][0]) == 18
    (seed,) = report["comparisons"]
    assert seed["name"] == "other seed"
    assert 20 < seed["alike"]["mean"] < 60
    assert (tmp_path / "quality.png").stat().st_size > 1000


def test_a_setting_that_nobody_knows_is_refused(capsys):
    assert main([str(MODEL), "--against", "bf17"]) == 2
    assert "bfloat16" in capsys.readouterr().err
