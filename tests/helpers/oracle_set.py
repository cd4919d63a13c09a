"""A golden set of other models, made by the dense oracle, with names that say nothing."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.helpers.dense_oracle import DenseOracle, visible_history
from tests.helpers.model_builders import SMALL_MODEL, weights_of
from vllm_omni.diffusion.models.lingbot_world.chunk import DmdSchedule

NAME = "variants"
VARIANTS = {
    "pebble": {"sink_size": 4, "sliding_window_num_frames": 8},
    "heron": {"sink_size": 5, "sliding_window_num_frames": 12},
}
WIDE = replace(SMALL_MODEL, attention_head_dim=32)
CHUNKS, SEED, SHIFT = 6, 5, 3.0
TOLERANCE = {"role": "output", "dtype": "float32", "rtol": 1e-4, "atol": 1e-4}
"""float32 against float64, through four noisy steps of six chunks: 2e-5 is seen."""
TIMES = ((0.0, 0.0), (700.0, 250.5), ((900.0, 500.0, 20.0), (1000.0, 0.0, 333.25)))
"""Timesteps of three calls: of both samples, or of each of their frames."""
STARTS, COMMITS = (1020, 1023, 1023), (True, False, False)
FORWARDS = len(TIMES)
_INPUTS = ("condition", "camera", "prompt_embeds")


def write_oracle_set(root: Path) -> Path:
    """Write ``arrays/variants.*``: weights, inputs, two windows, calls, and recipes for all."""
    (root / "arrays").mkdir()
    generator = torch.Generator().manual_seed(9)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    arrays = {
        "condition": drawn(1, 20, 3 * CHUNKS, 4, 6),
        "camera": drawn(1, 384, 3 * CHUNKS, 4, 6),
        "prompt_embeds": drawn(1, 20, WIDE.text_dim),
        "hidden": drawn(2, 36, 3, 4, 6),
        "steer": drawn(1, 384, 3, 4, 6),
    }
    arrays |= {f"weights.{name}": weight for name, weight in weights_of(WIDE).items()}
    entries: dict[str, object] = {name: {"role": "input", "dtype": "float32"} for name in arrays}
    recipes = []
    for variant, sizes in VARIANTS.items():
        made = _rollout(arrays, sizes)
        outputs = {f"{variant}{index}": result for index, result in enumerate(made)}
        arrays |= {name: made[result] for name, result in outputs.items()}
        recipes += _rollout_recipes(variant, outputs)
    flows = _flows(arrays)
    arrays |= {f"basalt{index}": flow for index, flow in enumerate(flows)}
    recipes.append(_forwards_recipe())
    entries |= {name: TOLERANCE for name in arrays if name not in entries}
    manifest = {"facts": {"sizes": VARIANTS}, "arrays": entries, "recipes": recipes}
    save_file(arrays, root / "arrays" / f"{NAME}.safetensors")
    (root / "arrays" / f"{NAME}.json").write_text(json.dumps(manifest))
    return root


def _rollout(inputs: dict[str, Tensor], sizes: dict[str, int]) -> dict[str, Tensor]:
    """Results of one rollout, named as recipes name them."""
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
            latents = torch.cat((x, condition))
            flow = oracle.forward(latents, schedule.timesteps[step], *around, start=start)
            made[f"flow/{chunk}/{step}"] = flow
            x = x - sigma * flow
            if step < 3:
                noise = torch.randn(1, 16, 3, 4, 6, generator=generator)[0].double()
                x = (1 - schedule.sigmas[step + 1]) * x + schedule.sigmas[step + 1] * noise
        made[f"x0/{chunk}"] = x
        clean = torch.cat((x, condition))
        made[f"commit/{chunk}"] = oracle.forward(clean, 0.0, *around, start=start, commit=True)
    last = 3 * CHUNKS - 3
    kept = [*visible_history(last, frames=3, **window), *range(last, last + 3)]
    stored = torch.cat([oracle.committed[1][frame][0] for frame in kept])
    for rank in range(2):  # the head that each of two ranks holds
        made[f"key/{CHUNKS - 1}/1/rank{rank}"] = stored[:, rank : rank + 1]
    return {name: array[None].float().contiguous() for name, array in made.items()}


def _flows(arrays: dict[str, Tensor]) -> list[Tensor]:
    """Flows of three calls of a batch of two, each sample in a session of its own.

    The oracle's sessions begin at frame 0: only distances between frames count.
    """
    flows: list[list[Tensor]] = [[] for _ in TIMES]
    around = arrays["steer"][0], arrays["prompt_embeds"][0]
    for sample in range(2):
        oracle = DenseOracle(weights_of(WIDE), heads=2, sink=3, window=9)
        latents = arrays["hidden"][sample].double()
        for index, (times, start, commit) in enumerate(zip(TIMES, STARTS, COMMITS, strict=True)):
            place = start - STARTS[0]
            flow = oracle.forward(latents, times[sample], *around, start=place, commit=commit)
            flows[index].append(flow)
    return [torch.stack(samples).float().contiguous() for samples in flows]


def _model(overrides: object) -> dict[str, object]:
    fields = ("num_attention_heads", "attention_head_dim", "text_dim", "freq_dim", "ffn_dim",
              "num_layers")  # fmt: skip
    config = {name: getattr(WIDE, name) for name in fields}
    return {"weights": f"{NAME}:weights.", "config": config, "overrides": overrides}


def _rollout_recipes(variant: str, outputs: dict[str, str]) -> list[dict[str, object]]:
    """The rollout on one rank and on two, which alone have keys of ranks."""
    return [
        {
            "op": "rollout",
            "model": _model(f"{NAME}:facts/sizes/{variant}"),
            "inputs": {name: f"{NAME}:{name}" for name in _INPUTS},
            "flow_shift": SHIFT,
            "seed": SEED,
            "chunks": CHUNKS,
            "ranks": ranks,
            "dtype": "float32",
            "outputs": {n: r for n, r in outputs.items() if ranks == 2 or "rank" not in r},
        }
        for ranks in (1, 2)
    ]


def _forwards_recipe() -> dict[str, object]:
    calls = [
        {
            "hidden_states": f"{NAME}:hidden",
            "camera": f"{NAME}:steer",
            "prompt_embeds": f"{NAME}:prompt_embeds",
            "timestep": times,
            "start_frame": start,
            "commit": commit,
        }
        for times, start, commit in zip(TIMES, STARTS, COMMITS, strict=True)
    ]
    return {
        "op": "forwards",
        "model": _model({"sink_size": 3, "sliding_window_num_frames": 9}),
        "calls": calls,
        "outputs": {f"basalt{index}": f"flow/{index}" for index in range(FORWARDS)},
    }
