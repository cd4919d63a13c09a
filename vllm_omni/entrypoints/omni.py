"""The synchronous Python API: a thin front of :class:`AsyncOmni`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NoReturn, overload

from vllm_omni.diffusion.geometry import chunks_of
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.errors import InvalidRequestError, SessionClosedError
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.outputs import OmniRequestOutput

if TYPE_CHECKING:
    from tqdm import tqdm


_Params = OmniDiffusionSamplingParams | Sequence[OmniDiffusionSamplingParams] | None


class Omni:
    """Generates worlds one after another; usable as a context manager.

    Arguments are those of :class:`AsyncOmni`, which does the work on a thread of its own, so
    that this class also works where an event loop is running already.
    """

    def __init__(
        self,
        model: str,
        *,
        deploy_config: str | None = None,
        stage_overrides: Mapping[str, object] | str | None = None,
        **kwargs: object,
    ) -> None:
        self._omni = AsyncOmni(
            model, deploy_config=deploy_config, stage_overrides=stage_overrides, **kwargs
        )
        self._loop: asyncio.AbstractEventLoop | None = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="omni loop", daemon=True
        )
        self._thread.start()

    @overload
    def generate(
        self,
        prompts: object,
        sampling_params_list: _Params = None,
        *,
        py_generator: Literal[False] = False,
        use_tqdm: bool = True,
    ) -> list[OmniRequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: object,
        sampling_params_list: _Params = None,
        *,
        py_generator: Literal[True],
        use_tqdm: bool = True,
    ) -> Generator[OmniRequestOutput, None, None]: ...

    def generate(
        self,
        prompts: object,
        sampling_params_list: _Params = None,
        *,
        py_generator: bool = False,
        use_tqdm: bool = True,
    ) -> list[OmniRequestOutput] | Generator[OmniRequestOutput, None, None]:
        """Make one rollout per prompt.

        Args:
            prompts: ``{"prompt": ..., "multi_modal_data": {"image": ...}}``, or a list of such.
            sampling_params_list: one for all prompts, or one per prompt.
            py_generator: give outputs as they come instead of a list at the end.
            use_tqdm: show progress over chunks.

        Raises:
            InvalidRequestError: before any model work; the engine stays usable.
            SessionClosedError: if this object is closed.
            OmniError: anything later closes the engine.
        """
        requests = _paired(prompts, sampling_params_list)
        outputs = self._outputs(requests)
        if py_generator:
            return outputs
        with _progress(requests, shown=use_tqdm) as bar:
            shown, self._omni.on_chunk = self._omni.on_chunk, bar.update
            try:
                made = list(outputs)
            finally:
                self._omni.on_chunk = shown
            bar.leave = True  # What a refusal leaves behind is no bar.
        return made

    def close(self) -> None:
        """End the engine; a second call does nothing."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        self._omni.shutdown()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()

    def __enter__(self) -> Omni:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _outputs(
        self, requests: list[tuple[object, OmniDiffusionSamplingParams]]
    ) -> Generator[OmniRequestOutput, None, None]:
        try:
            for prompt, params in requests:
                yield from self._one(prompt, params)
        except (InvalidRequestError, GeneratorExit):
            raise
        except BaseException:
            self.close()
            raise

    def _one(
        self, prompt: object, params: OmniDiffusionSamplingParams
    ) -> Iterator[OmniRequestOutput]:
        loop = self._loop
        if loop is None:
            raise SessionClosedError("this Omni is closed; make a new one")
        reader = _Reader(self._omni.generate(prompt, params))
        try:
            while output := asyncio.run_coroutine_threadsafe(reader.next(), loop).result():
                yield output
        finally:
            asyncio.run_coroutine_threadsafe(reader.close(), loop).result()


class _Reader:
    """Reads an asynchronous generator step by step, from another thread than its loop's."""

    def __init__(self, rollout: AsyncGenerator[OmniRequestOutput, None]) -> None:
        self._rollout = rollout
        self._step: asyncio.Task[object] | None = None

    async def next(self) -> OmniRequestOutput | None:
        self._step = asyncio.current_task()
        return await anext(self._rollout, None)

    async def close(self) -> None:
        # An interrupted wait leaves a step behind, and only a resting generator closes.
        if self._step is not None and not self._step.done():
            self._step.cancel()
            await asyncio.wait({self._step})
        await self._rollout.aclose()


def _paired(prompts: object, params: _Params) -> list[tuple[object, OmniDiffusionSamplingParams]]:
    many = list(prompts) if isinstance(prompts, list | tuple) else [prompts]
    if params is None or isinstance(params, OmniDiffusionSamplingParams):
        return [(prompt, params or OmniDiffusionSamplingParams()) for prompt in many]
    each = list(params)
    if len(each) == 1:
        each *= len(many)
    if len(each) != len(many):
        raise InvalidRequestError(
            f"{len(many)} prompts need one sampling_params, or one each; got {len(each)}",
            field="sampling_params_list",
        )
    return list(zip(many, each, strict=True))


def _progress(
    requests: Sequence[tuple[object, OmniDiffusionSamplingParams]], *, shown: bool
) -> tqdm[NoReturn]:
    """A bar over the chunks of all requests, without an end where a length is missing or wrong."""
    from tqdm import tqdm

    lengths = [params.num_frames for _, params in requests]
    try:
        total = sum(chunks_of(one) for one in lengths if isinstance(one, int)) or None
    except InvalidRequestError:
        total = None  # The request itself is refused with this error in a moment.
    return tqdm(total=total, unit=" chunks", disable=not shown, leave=False)
