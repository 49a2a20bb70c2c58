"""HTTP client of one vLLM server: its health, the protocol of a weight update, and completions from tokens to tokens.

Calls that may be repeated without harm are repeated, a few times within the call's deadline; the steps of a weight update never are.
Every failure names the engine, its pod and its address.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, retry_if_result, stop_after_attempt, wait_random_exponential
from yarl import URL

from grpo_workload.contract import Engine
from grpo_workload.types import Completion

ATTEMPTS = 4
ANSWER_SECONDS = 5.0  # for its health, which the server knows without asking its workers
ERROR_CHARS = 500
ABANDONED = "abandoned"  # the version of an engine that holds no weights to speak of


class EngineError(RuntimeError):
    """An engine failed; `engine` is the one, and the text names it with its pod and address."""

    def __init__(self, engine: Engine, what: str) -> None:
        super().__init__(engine, what)  # as arguments, so that it can be pickled to other ranks
        self.engine = engine
        self.what = what

    def __str__(self) -> str:
        return f"engine {self.engine.name} (pod {self.engine.pod}, {self.engine.host}:{self.engine.port}) {self.what}"


class _NoAnswerError(EngineError):
    """The connection failed; nothing is known of the request."""


class _BusyError(EngineError):
    """503: the engine is paused or starting."""


class RefusedError(EngineError, ValueError):
    """The engine refused a request for what is in it (400)."""


@dataclass(frozen=True, slots=True)
class EngineClient:
    """One engine. Deadlines are in seconds, over all attempts of a call."""

    engine: Engine
    session: aiohttp.ClientSession
    deadline: float
    retry_wait: float = 0.2  # before the second attempt; it grows

    async def is_healthy(self) -> None:
        """EngineError unless it answers now, and its workers live."""
        await self._call("GET", "/health", deadline=ANSWER_SECONDS)

    async def identify(self) -> str:
        """What requests to this process go by: `engine_command` gives each start another name. EngineError when its size is wrong."""
        size = (await self._repeat("GET", "/get_world_size"))["world_size"]
        if size != self.engine.world_size:
            raise EngineError(self.engine, f"has {size} workers, and the contract says {self.engine.world_size}")
        models = await self._repeat("GET", "/v1/models")
        return str(models["data"][-1]["id"])  # its adapter, which is listed after the model, where it has one

    async def weight_version(self) -> str:
        """The version that the last `finish_update` gave; only where `vllm_api.tells_weight_version`."""
        return str((await self._repeat("GET", "/weight_info"))["weight_version"])

    async def init_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Let its workers join a transfer group; returns when all of the group have."""
        await self._call("POST", "/init_weight_transfer_engine", json={"init_info": init_info})

    async def pause(self) -> None:
        """Let no request start, and wait for those that run."""
        await self._repeat("POST", "/pause", params={"mode": "wait"})

    async def start_update(self) -> None:
        """Begin replacing all weights."""
        await self._call("POST", "/start_weight_update")

    async def update(self, update_info: Mapping[str, Any]) -> None:
        """Receive and load all weights."""
        await self._call("POST", "/update_weights", json={"update_info": update_info})

    async def finish_update(self, version: int | str) -> None:
        """End the update; releases that know versions keep `version`."""
        await self._call("POST", "/finish_weight_update", json={"weight_version": str(version)})

    async def abandon_update(self) -> None:
        """Pause an engine that was in a failed update, and make it fit for another: layers that lack something drop what they have.

        vLLM would count tensors that it has buffered again, and fill layers with them. It may refuse to start, being inside the update, and
        workers may have old failures still to tell, at any call, so the first rounds may fail.
        """
        for attempt in range(1, ATTEMPTS + 1):
            failure = await _failure(self.pause())
            if failure is None:
                failures = [await _failure(self.start_update()), await _failure(self.finish_update(ABANDONED))]
                failure = failures[0] or failures[1]
            if failure is None:
                return
            if attempt == ATTEMPTS:
                raise failure

    async def reset_prefix_cache(self) -> None:
        """Forget what the old weights have cached. EngineError when blocks are still held after several attempts."""
        cleared = await self._repeat("POST", "/reset_prefix_cache", again=lambda answer: not answer["success"])
        if not cleared["success"]:
            raise EngineError(self.engine, f"could not reset its prefix cache in {ATTEMPTS} attempts: blocks of it are still held")

    async def resume(self) -> None:
        """Let requests start again."""
        await self._repeat("POST", "/resume")

    async def complete(
        self, prompt_ids: Sequence[int], *, model: str, num_samples: int, sampling: Mapping[str, Any], version: int
    ) -> list[Completion]:
        """Sample completions of one prompt.

        Args:
            prompt_ids: tokens of the prompt.
            model: what `identify` told; an engine that was started anew since does not answer to it.
            num_samples: completions to return.
            sampling: parameters under vLLM's names; with a seed, repeating the request gives the same again.
            version: of the weights, for the completions.

        Raises:
            RefusedError: 400, for example for a prompt that is too long.
            EngineError: the engine failed, or is another process than the one that `model` names.
        """
        request = {"model": model, "prompt": list(prompt_ids), "n": num_samples, "logprobs": 0, "return_token_ids": True, **sampling}
        answer = await self._repeat("POST", "/v1/completions", json=request)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        assert len(choices) == num_samples, (len(choices), num_samples)
        return [self._completion(choice, version) for choice in choices]

    def _completion(self, choice: Mapping[str, Any], version: int) -> Completion:
        if choice["finish_reason"] not in ("stop", "length"):
            raise EngineError(self.engine, f"ended a completion with {choice['finish_reason']!r}, before it was done")
        token_ids, logprobs = tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"])
        assert len(token_ids) == len(logprobs), (len(token_ids), len(logprobs))
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            text=choice["text"],
            finish_reason=choice["finish_reason"],
            weight_version=version,
        )

    async def _repeat(self, method: str, path: str, *, again: Any = lambda _: False, **request: Any) -> Any:
        """A call that may be repeated: after a lost connection, while the engine is busy, and while `again` says so of the answer."""
        attempts = AsyncRetrying(
            retry=retry_if_exception_type((_NoAnswerError, _BusyError)) | retry_if_result(again),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_random_exponential(multiplier=self.retry_wait, max=5),
            # The last attempt's answer or exception, not tenacity's own.
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )
        return await attempts(self._call, method, path, **request)

    async def _call(self, method: str, path: str, *, deadline: float | None = None, **request: Any) -> Any:
        limit = deadline or self.deadline
        url = URL.build(scheme="http", host=self.engine.host, port=self.engine.port, path=path)
        try:
            async with self.session.request(method, url, timeout=aiohttp.ClientTimeout(total=limit), **request) as response:
                if response.ok:
                    return await response.json() if response.content_type == "application/json" else None
                text = (await response.text())[:ERROR_CHARS]
        except TimeoutError as error:
            raise EngineError(self.engine, f"did not answer {path} within {limit:g} s") from error
        except aiohttp.ClientError as error:
            raise _NoAnswerError(self.engine, f"lost the connection or refused it at {path}: {error}") from error
        raise self._failure(path, response.status, text)

    def _failure(self, path: str, status: int, text: str) -> EngineError:
        if status == HTTPStatus.NOT_FOUND and path == "/v1/completions":
            return EngineError(self.engine, "is another process than the one that was filled with weights: its container was started anew")
        kind = {HTTPStatus.BAD_REQUEST: RefusedError, HTTPStatus.SERVICE_UNAVAILABLE: _BusyError}.get(HTTPStatus(status), EngineError)
        return kind(self.engine, f"answered {path} with {status}: {text}")


async def _failure(call: Coroutine[Any, Any, None]) -> EngineError | None:
    """What the engine answers, if it answers that it failed."""
    try:
        await call
    except _NoAnswerError:
        raise
    except EngineError as error:
        return error
    return None
