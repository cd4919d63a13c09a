"""One stage of the training: a model and its optimiser, saved so that it resumes exactly."""

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where the twins live: on a GPU where there is one."""
_WARM_STEPS = 60
_DECAY_SHARE = 0.4
"""The learning rate falls linearly over the last part of the steps."""
_SAVE_EVERY_S = 60.0
_POINT_EVERY = 50


class Optimiser:
    """Muon for matrices, which a convolution's weight is output by output, and Adam for the rest.

    An update whose singular values are all near one learns every direction of a matrix at one
    rate (K. Jordan et al., 2024), which at a small budget of steps is worth several times Adam.
    Its steps are made as large as Adam's, so that one learning rate serves both.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        matrices, others = [], []
        for name, parameter in named:
            sides = parameter.flatten(1).shape if parameter.dim() > 1 else (0, 0)
            small = min(sides) < 8 or "modulation" in name
            (others if small else matrices).append(parameter)
        self._views = [(p, nn.Parameter(p.detach().flatten(1))) for p in matrices]
        views = [view for _, view in self._views]
        self._parts = (
            torch.optim.Muon(views, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.Adam(others, betas=(0.9, 0.98)),
        )

    def step(self, rate: float) -> None:
        """Apply the gradients at hand and forget them; parameters without one stay."""
        for parameter, view in self._views:
            view.grad = None if parameter.grad is None else parameter.grad.flatten(1)
            parameter.grad = None
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad()

    def state_dict(self) -> list[dict[str, Any]]:
        """What :meth:`load_state_dict` resumes from, exactly."""
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Go on from the moments of a :meth:`state_dict`."""
        for part, moments in zip(self._parts, state, strict=True):
            part.load_state_dict(moments)


class Stage:
    """A model in training. ``average`` holds the exponential average that is exported.

    Args:
        path: the checkpoint; loaded when it is there.
        model: the network, with fresh weights.
        steps: where the learning rate reaches its end; a later run may name more.
        peak: the highest learning rate.
        memory: how much of the average one step keeps, in the long run.
    """

    def __init__(
        self, path: Path, model: nn.Module, *, steps: int, peak: float, memory: float = 0.995
    ) -> None:
        self.path, self.model, self.steps, self.peak = path, model.to(DEVICE), steps, peak
        self.step, self.memory = 0, memory
        self.optimiser = Optimiser(model.named_parameters())
        self.average = {name: value.clone() for name, value in model.state_dict().items()}
        self.rng = np.random.default_rng(0)
        self.curve: list[dict[str, float]] = []
        self._sums: dict[str, list[float]] = {}
        self._cpu_before, self._cpu_start = 0.0, time.process_time()
        self._saved_at = time.monotonic()
        torch.manual_seed(0)
        if path.exists():
            self._load()

    @property
    def cpu_minutes(self) -> float:
        """Processor time of this stage, over all runs."""
        return (self._cpu_before + time.process_time() - self._cpu_start) / 60

    @property
    def rate(self) -> float:
        """The learning rate of the coming step."""
        left = (self.steps - self.step) / (_DECAY_SHARE * self.steps)
        return self.peak * min(1.0, (self.step + 1) / _WARM_STEPS) * min(1.0, max(0.02, left))

    def remaining(self) -> Iterator[int]:
        """Yield the steps that are left, each of which calls :meth:`learn`; save on the way."""
        with tqdm(total=self.steps, initial=self.step, desc=self.path.stem, mininterval=10) as bar:
            while self.step < self.steps:
                yield self.step
                if self.step % _POINT_EVERY == 0:
                    bar.set_postfix(self._close_point())
                bar.update()
                self.save()
        self.save(now=True)

    def learn(self, loss: Tensor) -> None:
        """One step down the gradient of ``loss``."""
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"step {self.step} has a gradient that is not finite; resume with a lower --peak"
            )
        self.optimiser.step(self.rate)
        self.step += 1
        keep = min(self.memory, self.step / (self.step + 9))
        for name, value in self.model.state_dict().items():
            self.average[name].lerp_(value, 1 - keep)

    def note(self, **values: float) -> None:
        """Remember figures of this step for the next point of the curve."""
        for name, value in values.items():
            self._sums.setdefault(name, []).append(value)

    def _close_point(self) -> dict[str, float]:
        """Means of what was noted since the last point of the curve."""
        means = {name: float(np.mean(values)) for name, values in self._sums.items()}
        self._sums.clear()
        passed = {"step": float(self.step), "cpu_minutes": round(self.cpu_minutes, 3)}
        self.curve.append(passed | means)
        return self.curve[-1]

    def save(self, *, now: bool = False) -> None:
        """Write the checkpoint, whole or not at all; once a minute, or ``now``."""
        if not now and time.monotonic() - self._saved_at < _SAVE_EVERY_S:
            return
        self._saved_at = time.monotonic()
        state = {
            "model": self.model.state_dict(),
            "average": self.average,
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "cpu_s": self.cpu_minutes * 60,
            "curve": self.curve,
            "sums": self._sums,
            "numpy": self.rng.bit_generator.state,
            "torch": torch.get_rng_state(),
        }
        part = self.path.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.path)

    def adopt(self, weights: Mapping[str, Tensor], curve: list[dict[str, float]]) -> None:
        """Begin from the exported weights of an earlier training, and go on with its curve."""
        self.model.load_state_dict({name: weight.float() for name, weight in weights.items()})
        self.average = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.curve, self.step = curve, int(curve[-1]["step"])
        self._cpu_before = curve[-1]["cpu_minutes"] * 60
        self.save(now=True)

    def _load(self) -> None:
        state = torch.load(self.path, map_location=DEVICE, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.average = state["average"]
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self._cpu_before = state["step"], state["cpu_s"]
        self.curve, self._sums = state["curve"], state["sums"]
        self.rng.bit_generator.state = state["numpy"]
        torch.set_rng_state(state["torch"].cpu())


def averaged(path: Path) -> dict[str, Tensor]:
    """The weights of a stage's checkpoint that are worth exporting."""
    return torch.load(path, map_location="cpu", weights_only=False)["average"]


def curve_of(path: Path) -> list[dict[str, float]]:
    """The points of a stage's curve."""
    return torch.load(path, map_location="cpu", weights_only=False)["curve"]
