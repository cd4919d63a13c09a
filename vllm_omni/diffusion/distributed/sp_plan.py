"""Which tensors of a forward are shared out over the sequence ranks: declared, not scattered.

Every tensor in a plan is laid out ``[latent frames, tokens of a frame, ...]``; a rank holds its
share of the tokens of every frame (see :class:`UlyssesExchange`). What is not in the plan is whole
on every rank: timestep rows, the prompt's keys and values, weights.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from vllm_omni.diffusion.distributed.comm import UlyssesExchange


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """Names of the tensors that a model splits on its way in and gathers on its way out."""

    split: frozenset[str]
    gather: frozenset[str]

    def split_tokens(
        self, name: str, x: Float[Tensor, "frames tokens *rest"], exchange: UlyssesExchange
    ) -> Float[Tensor, "frames local_tokens *rest"]:
        """This rank's tokens of every frame.

        Raises:
            KeyError: if the plan does not split ``name``; that is a bug of the model.
        """
        if name not in self.split:
            raise KeyError(f"{name} is not split; the plan splits {sorted(self.split)}")
        return exchange.local_tokens(x)

    def gather_tokens(
        self,
        name: str,
        x: Float[Tensor, "frames local_tokens channels"],
        exchange: UlyssesExchange,
    ) -> Float[Tensor, "frames tokens channels"]:
        """All tokens of every frame, on every rank.

        Raises:
            KeyError: if the plan does not gather ``name``; that is a bug of the model.
        """
        if name not in self.gather:
            raise KeyError(f"{name} is not gathered; the plan gathers {sorted(self.gather)}")
        return exchange.gather_tokens(x)
