"""Which rank of a sequence-parallel group holds which tokens of a chunk.

Rank r of n holds the tokens ``[r * P / n, (r + 1) * P / n)`` of *every* latent frame, P being the
tokens of a frame. A model splits what it takes in token by token (patches of latents and camera,
rotary tables) and joins what it puts out. Everything else is whole on every rank: timestep rows,
keys and values of the prompt, weights.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """The share of one rank."""

    rank: int
    size: int

    def local_count(self, tokens: int) -> int:
        """Number of tokens on each rank out of ``tokens`` of whole latent frames."""
        return tokens // self.size

    def split(
        self, x: Float[Tensor, "frames tokens *rest"]
    ) -> Float[Tensor, "frames local_tokens *rest"]:
        """Take this rank's tokens of every frame."""
        share = self.local_count(x.shape[1])
        return x[:, self.rank * share : (self.rank + 1) * share]

    def join(
        self, shares: Float[Tensor, "ranks frames local_tokens channels"]
    ) -> Float[Tensor, "frames tokens channels"]:
        """Put the shares of all ranks together, in the order of ranks."""
        return shares.transpose(0, 1).flatten(1, 2)
