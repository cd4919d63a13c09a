"""Lets all ranks refuse together what one of them refuses, before any collective of the work.

A rank that raised alone would leave its peers waiting inside an exchange. So every rank says
with one small message whether it refuses, and nobody goes on unless everybody does.
"""

from __future__ import annotations

from vllm_omni.diffusion.distributed.parallel_state import RankGroup
from vllm_omni.errors import OmniError


class PeerRefusedError(OmniError):
    """Another rank refused; this one had nothing against it."""


class Agreement:
    """The agreement of one group; a rank that is alone always agrees with itself.

    Args:
        control: all ranks, on a backend that exchanges host tensors.
    """

    def __init__(self, control: RankGroup) -> None:
        self._control = control

    def confirm(self, refusal: OmniError | None) -> None:
        """Return if no rank refuses.

        Args:
            refusal: why this rank refuses; ``None`` if it does not.

        Raises:
            OmniError: ``refusal`` itself.
            PeerRefusedError: if only others refuse.
        """
        refused_by_any = self._control.any(flag=refusal is not None)
        if refusal is not None:
            raise refusal
        if refused_by_any:
            raise PeerRefusedError("another rank refused; see the error that it reports")
