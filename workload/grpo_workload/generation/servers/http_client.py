"""HTTP client of one vLLM server: health, weight updates, and completions of token ids as token ids.

Calls that are safe to repeat are retried a few times; steps of a weight update never are. Every failure names the
engine, its pod and its address.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential
from yarl import URL

from grpo_spec.contract import Engine
from grpo_workload.algorithm.samples import Completion, PromptImages
from grpo_workload.generation import vllm_api
from grpo_workload.generation.servers.errors import (
    AbsentError,
    BusyError,
    EngineDiffersError,
    EngineError,
    NoAnswerError,
    RefusedError,
    SilentError,
)
from grpo_workload.pod.engines import abandoned
from grpo_workload.pod.vllm_command import attempt_of
from grpo_workload.weights.differ import ALTERED, MARK

ATTEMPTS = 4  # number of times that a call is tried
ANSWER_SECONDS = 5.0  # deadline of a health check, which the server answers without asking its workers
ERROR_CHARS = 500  # number of characters of a response that an error quotes
PauseMode = Literal["wait", "keep", "abort"]


@dataclass(frozen=True, slots=True)
class EngineClient:
    """Client of one engine."""

    engine: Engine
    session: aiohttp.ClientSession
    deadline: float  # seconds for each attempt of a call, except for completions
    attempt: int = 0  # of the job
    retry_wait: float = 0.2  # seconds before the second attempt, at most; it doubles for each further one
    _ours: set[str] = field(default_factory=set)  # processes that are known to be of this attempt

    async def is_healthy(self) -> None:
        """Raise EngineError unless the engine answers now and its workers are alive."""
        await self._call("GET", "/health", deadline=ANSWER_SECONDS)

    async def is_ready(self) -> None:
        """Raise EngineError unless the engine is healthy, and this attempt may use it."""
        await self.is_healthy()
        if self.attempt:  # before the first one there is none
            await self.has_begun()

    async def identify(self) -> str:
        """Return the model name that requests to this process use; each start gets another one (`engine_command`).

        EngineError when the engine's number of workers is wrong, or as `has_begun`.
        """
        size = (await self._repeat("GET", "/get_world_size"))["world_size"]
        if size != self.engine.world_size:
            raise EngineError(self.engine, f"has {size} workers, but the contract says {self.engine.world_size}")
        return await self.has_begun()

    async def has_begun(self) -> str:
        """Return the name of this process, of which the engine's pod has said that the attempt may use it.

        EngineError before: it is an earlier attempt's, and its pod may start it again.
        """
        models = await self._repeat("GET", "/v1/models")
        name = str(models["data"][-1]["id"])  # the adapter if there is one, which is listed after the model
        if self.attempt and name not in self._ours and attempt_of(name) != str(self.attempt):
            version = (await self._call("GET", "/weight_info", deadline=ANSWER_SECONDS))["weight_version"]
            if version != abandoned(self.attempt):
                raise EngineError(self.engine, f"is an earlier attempt's: its pod has not begun attempt {self.attempt}")
        self._ours.add(name)
        return name

    async def weight_version(self) -> str:
        """Return the version passed to the last `finish_update`."""
        return str((await self._repeat("GET", "/weight_info"))["weight_version"])

    async def init_transfer(self, init_info: Mapping[str, Any], *, deadline: float) -> None:
        """Let the engine's workers join a transfer group; return when all members have joined."""
        await self._call("POST", "/init_weight_transfer_engine", deadline=deadline, json={"init_info": init_info})

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Block new requests and wait for the running ones, then drop what was cached with the present weights.

        With "abort", end the running ones. With "keep", stop them where they are until `resume`; the cache stays.
        """
        await self._repeat("POST", "/pause", params={"mode": mode, "clear_cache": str(mode != "keep").lower()})

    async def start_update(self) -> None:
        """Begin replacing all weights."""
        await self._call("POST", "/start_weight_update")

    async def update(self, update_info: Mapping[str, Any]) -> None:
        """Receive and load all weights, however long that takes; the caller checks that there is progress."""
        await self._call("POST", "/update_weights", deadline=math.inf, json={"update_info": update_info})

    async def finish_update(self, version: int | str) -> None:
        """End the update, after which the engine has weights of `version`."""
        await self._call("POST", "/finish_weight_update", json={"weight_version": str(version)})

    async def forget_attempt(self) -> None:
        """End what an earlier attempt has left in an engine that goes on: requests, an update, and what it cached."""
        version = await self.weight_version()
        if version.isdecimal() or version == abandoned(self.attempt):  # else it was started for this attempt
            await self.abandon_update("abort")

    async def abandon_update(self, mode: PauseMode = "wait") -> None:
        """Pause an engine after a failed update and prepare it for another: incomplete layers drop buffered tensors.

        Otherwise vLLM would count those tensors again and fill layers with them. The first attempts may fail: the
        engine may refuse to start an update inside another, and any call may report an old failure of a worker.
        """
        for attempt in range(1, ATTEMPTS + 1):
            failure = await _failure(self.pause(mode))
            if failure is None:
                failures = [
                    await _failure(self.start_update()),
                    await _failure(self.finish_update(abandoned(self.attempt))),
                ]
                failure = failures[0] or failures[1]
            if failure is None:
                return
            if attempt == ATTEMPTS:
                raise failure

    async def resume(self) -> None:
        """Let requests start again."""
        await self._repeat("POST", "/resume")

    async def metrics(self) -> str:
        """Return the text of GET /metrics, which has vLLM's own metrics."""
        text = str(await self._call("GET", "/metrics", deadline=ANSWER_SECONDS))
        if "vllm:num_requests_running" not in text:
            what = "has no metrics of vLLM at /metrics, so nobody can tell whether it makes progress"
            raise EngineError(self.engine, what)
        return text

    async def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        model: str,
        num_samples: int,
        sampling: Mapping[str, Any],
        version: int,
        images: PromptImages | None = None,
    ) -> list[Completion]:
        """Sample completions of one prompt, however long that takes; the caller checks that the engine makes progress.

        Args:
            prompt_ids: the prompt's token ids.
            model: the name that `identify` returned; an engine that has restarted since refuses it.
            num_samples: number of completions.
            sampling: parameters under vLLM's names; with a seed, the same request returns the same completions.
            version: version of the weights, as the completions record it.
            images: the prompt's.

        Raises:
            RefusedError: the engine answered 400, for example because the prompt is too long.
            EngineError: the engine failed, or is another process than the one that `model` names.
            ConfigError: the engine makes other tokens of the images than the model's processor.
        """
        request: dict[str, Any] = {
            "model": model,
            "prompt": list(prompt_ids if images is None else images.engine_ids),
            "n": num_samples,
            "logprobs": 0,
            "return_token_ids": True,
            **vllm_api.BARE,
            **sampling,
        }
        if images is not None:
            encoded = await asyncio.to_thread(vllm_api.encode_images, images)
            request["vllm_xargs"] = request["vllm_xargs"] | {vllm_api.IMAGES: encoded}
        answer = await self._repeat("POST", "/v1/completions", deadline=math.inf, json=request)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        assert len(choices) == num_samples, (len(choices), num_samples)
        if images is not None:
            vllm_api.check_read(prompt_ids, choices[0]["prompt_token_ids"])
        return [self._completion(choice, version) for choice in choices]

    async def score(self, token_ids: Sequence[int], *, model: str) -> list[float]:
        """Return the engine's log-probabilities of all tokens but the first, at temperature 1. Raises as `complete`."""
        request = {"model": model, "prompt": list(token_ids), "max_tokens": 1, "prompt_logprobs": 0}
        answer = await self._repeat("POST", "/v1/completions", json=request)
        rows = answer["choices"][0]["prompt_logprobs"]
        return [row[str(token)]["logprob"] for token, row in zip(token_ids[1:], rows[1:], strict=True)]

    def _completion(self, choice: Mapping[str, Any], version: int) -> Completion:
        if choice["finish_reason"] not in ("stop", "length"):
            raise EngineError(self.engine, f"ended an unfinished completion with {choice['finish_reason']!r}")
        token_ids = tuple(choice["token_ids"])
        # JSON has no NaN: null stands for it.
        logprobs = tuple(math.nan if value is None else value for value in choice["logprobs"]["token_logprobs"])
        assert len(token_ids) == len(logprobs), (len(token_ids), len(logprobs))
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            text=choice["text"],
            finish_reason=choice["finish_reason"],
            weight_version=version,
            routed_experts=vllm_api.decode_array(choice.get("routed_experts")),
        )

    async def _repeat(self, method: str, path: str, **request: Any) -> Any:
        """Call; retry after a lost connection, and while the engine is busy."""
        attempts = AsyncRetrying(
            retry=retry_if_exception_type((NoAnswerError, BusyError)),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_random_exponential(multiplier=self.retry_wait, max=5),
            reraise=True,
        )
        return await attempts(self._call, method, path, **request)

    async def _call(self, method: str, path: str, *, deadline: float | None = None, **request: Any) -> Any:
        limit = deadline or self.deadline
        timeout = aiohttp.ClientTimeout(total=None if math.isinf(limit) else limit, sock_connect=self.deadline)
        url = URL.build(scheme="http", host=self.engine.host, port=self.engine.port, path=path)
        try:
            async with self.session.request(method, url, timeout=timeout, **request) as response:
                if response.ok:
                    return await (response.json() if response.content_type == "application/json" else response.text())
                text = (await response.text())[:ERROR_CHARS]
        except TimeoutError as error:
            raise SilentError(self.engine, f"did not answer {path} within {limit:g} s") from error
        except aiohttp.ClientConnectorDNSError as error:
            raise AbsentError(self.engine, f"has no address: {error}") from error
        except aiohttp.ClientError as error:
            raise NoAnswerError(self.engine, f"lost or refused the connection at {path}: {error}") from error
        raise self._failure(path, response.status, text)

    def _failure(self, path: str, status: int, text: str) -> EngineError:
        if status == HTTPStatus.NOT_FOUND and path == "/v1/completions":
            return EngineError(
                self.engine,
                "is another process than the one that got the weights: its container has restarted",
            )
        if MARK in text:
            return EngineDiffersError(self.engine, f"refused its weights: {text[text.index(MARK) :]}")
        if ALTERED in text:
            return EngineError(self.engine, f"refused its weights: {text[text.index(ALTERED) :]}")
        kind = {HTTPStatus.BAD_REQUEST: RefusedError, HTTPStatus.SERVICE_UNAVAILABLE: BusyError}.get(
            HTTPStatus(status), EngineError
        )
        return kind(self.engine, f"answered {path} with {status}: {text}")


async def _failure(call: Coroutine[Any, Any, None]) -> EngineError | None:
    """Return the error that the engine answers with; None if the call succeeds."""
    try:
        await call
    except (NoAnswerError, SilentError):
        raise
    except EngineError as error:
        return error
    return None
