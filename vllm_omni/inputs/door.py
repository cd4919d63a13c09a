"""The one door for requests, as one kind of client sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import SessionRequest, SourceImage, TokenizedPrompt
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.checking import renamed
from vllm_omni.inputs.request import RequestPolicy, RolloutRequest, parse_rollout, session_request


@dataclass(frozen=True, slots=True)
class Door:
    """Turns what a client asks for into a request of the engine, in the client's own words.

    Attributes:
        policy: what the deployment allows.
        check_fits: raises for a size that the workers, where they are known, can never hold.
        prepare_picture: decodes a first picture, as the model wants it.
        tokenize: reads a prompt, as the model wants it.
        names: fields of a request that these clients know by another name.
    """

    policy: RequestPolicy
    check_fits: Callable[[VideoGeometry], None]
    prepare_picture: Callable[[object], SourceImage]
    tokenize: Callable[[str], TokenizedPrompt]
    names: Mapping[str, str]

    def check(self, given: Mapping[str, object]) -> RolloutRequest:
        """Check a request as far as that needs no picture and no file.

        Args:
            given: values by field of the request; ``None`` is a value that was not given.

        Raises:
            InvalidRequestError: naming the field, what was got and what is needed.
            OutOfKVMemoryError: if its window can never fit.
        """
        with self._in_their_words():
            request = parse_rollout(given, self.policy)
        size = request.geometry or self.policy.geometry
        if size is not None:
            self.check_fits(size)
        return request

    def picture(self, source: object) -> SourceImage:
        """Decode a picture; not for an event loop."""
        with self._in_their_words():
            return self.prepare_picture(source)

    def complete(self, request: RolloutRequest, picture: SourceImage) -> SessionRequest:
        """Tokenize the prompt and read what files a checked request names; not for an event loop.

        Raises:
            InvalidRequestError: for a camera that cannot be read or does not fit, or a picture
                whose shape makes no video.
        """
        with self._in_their_words():
            return session_request(request, self.tokenize(request.prompt), picture, self.policy)

    @contextmanager
    def _in_their_words(self) -> Iterator[None]:
        try:
            yield
        except InvalidRequestError as error:
            raise renamed(error, self.names) from error
