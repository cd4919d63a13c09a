"""The optimiser: Muon for matrices (momentum, made orthogonal), Adam for the rest.

Muon is due to K. Jordan et al. (2024): an update whose singular values are all near one learns
every direction of a matrix at one rate, which at a small budget of steps is worth several times
Adam. The scale 0.2 sqrt(longer side) makes its steps as large as Adam's.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float32
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic whose iterates drive singular values towards one."""


def orthogonal(stack: Float32[Tensor, "n rows columns"]) -> Float32[Tensor, "n rows columns"]:
    """Nearly the orthogonal polar factor of each matrix: singular values near one."""
    wide = stack.shape[1] <= stack.shape[2]
    x = (stack if wide else stack.transpose(1, 2)).bfloat16()
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.transpose(1, 2)).float()


class Muon(torch.optim.Optimizer):
    """One learning rate for both kinds; ``state_dict`` resumes exactly."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], *, decay: float = 0.01) -> None:
        matrices, others = [], []
        for name, parameter in named:
            sides = parameter.flatten(1).shape if parameter.dim() > 1 else (0, 0)
            small = min(sides) < 8 or "modulation" in name
            (others if small else matrices).append(parameter)
        groups = [{"params": matrices, "muon": True}, {"params": others, "muon": False}]
        super().__init__(groups, {"lr": 0.0, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Apply the gradients at hand; parameters without one stay."""
        del closure
        for group in self.param_groups:
            present = [p for p in group["params"] if p.grad is not None]
            (self._muon if group["muon"] else self._adam)(present, group["lr"], group["decay"])

    def _muon(self, parameters: list[nn.Parameter], lr: float, decay: float) -> None:
        by_shape: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = {}
        for p in parameters:
            state = self.state[p]
            momentum = state.setdefault("momentum", torch.zeros_like(p)).mul_(0.95).add_(p.grad)
            update = (p.grad + 0.95 * momentum).flatten(1)
            by_shape.setdefault(update.shape, []).append((p, update))
        for shape, members in by_shape.items():
            updates = orthogonal(torch.stack([update for _, update in members]))
            for (p, _), update in zip(members, updates, strict=True):
                p.mul_(1 - lr * decay).add_(update.view_as(p), alpha=-lr * 0.2 * max(shape) ** 0.5)

    def _adam(self, parameters: list[nn.Parameter], lr: float, decay: float) -> None:
        del decay
        for p in parameters:
            state = self.state[p]
            if not state:
                state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
            state["step"] += 1
            state["mean"].lerp_(p.grad, 0.1)
            state["square"].mul_(0.98).addcmul_(p.grad, p.grad, value=0.02)
            mean = state["mean"] / (1 - 0.9 ** state["step"])
            root = (state["square"] / (1 - 0.98 ** state["step"])).sqrt()
            p.add_(mean / (root + 1e-8), alpha=-lr)
