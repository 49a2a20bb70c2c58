"""The reward `judge`: a language model behind an OpenAI-compatible API scores completions."""

from __future__ import annotations

import asyncio
import json
import logging
import string
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from http import HTTPStatus
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from grpo_spec.errors import ConfigError
from grpo_spec.rewards import JudgeConfig
from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.data.observation import asked
from grpo_workload.data.prompt_source import PromptSource
from grpo_workload.ranks.loop_thread import LoopThread
from grpo_workload.rewards.answer_in_text import compiled
from grpo_workload.rewards.scorer import Circumstances, RewardError, Scorer
from grpo_workload.rewards.trl_signature import Logged, Values

logger = logging.getLogger(__name__)

_ERROR_CHARS = 500  # of a response that an error quotes
_LONGEST_WAIT = 30.0  # seconds between two tries, unless the API asks for more
_REFUSED = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND}
_AGAIN = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}
Answer = tuple[str, Counter[str]]
"""The judge's answer, and its cost."""
_COUNTED = ("requests", "prompt_tokens", "completion_tokens", "unreadable")


class _AgainError(RewardError):
    """A failure that may pass; the API may have said after how many seconds to ask again."""

    def __init__(self, message: str, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after


class Judge(Scorer):
    """Asks the judge about each completion; what it costs is in metrics, its answers in completions.jsonl."""

    def __init__(
        self, name: str, config: JudgeConfig, source: PromptSource, environ: Mapping[str, str], *, wait: float = 1.0
    ) -> None:
        """Ask nothing yet. `wait` seconds pass, on average, before the first retry.

        Raises:
            ConfigError: the API key is not set, or the template names a column that is not there.
        """
        self._field, self._config = f"rewards[{name}].judge", config
        self._score = compiled(config.score_pattern)
        self._backoff = wait_random_exponential(multiplier=wait, max=_LONGEST_WAIT)
        if (key := config.api_key_env) is not None and key not in environ:
            raise ConfigError(
                f"{self._field}.apiKeyEnv: {key} is not set in the trainer's pods; set it in podTemplate.env, or "
                "envFrom"
            )
        self._headers = {} if key is None else {"Authorization": f"Bearer {environ[key]}"}
        _check_template(f"{self._field}.promptTemplate", config.prompt_template, source.batch(0, 1)[0].columns)
        self._logged = Logged()
        self._thread: LoopThread | None = None
        self._lock = threading.Lock()  # groups of later steps begin, in another thread, while scores are asked for
        self._begun: dict[str, list[Future[Answer]]] = {}  # by question; equal ones are asked as often as they come

    def begin(self, prompt: Prompt, completions: Sequence[Completion]) -> None:
        """Begin to ask about the completions of a prompt; `score` returns their scores later."""
        with self._lock:
            for completion in completions:
                question = self._question(prompt, completion)
                self._begun.setdefault(question, []).append(self._submit(question))

    def score(self, prompts: list[Prompt], completions: list[Completion], circumstances: Circumstances) -> Values:
        """Return the scores of completions[i], an answer to prompts[i]; None where the judge gives none.

        Raises:
            ConfigError: the API refuses the key, or has no such address or model.
            RewardError: the API failed as often as requests are repeated, or refused one.
        """
        with self._lock:
            pending = [self._answer_to(self._question(*pair)) for pair in zip(prompts, completions, strict=True)]
        try:
            found = [one.result() for one in pending]
        finally:
            for one in pending:
                one.cancel()  # those that an error leaves
        counts, answers = Counter(dict.fromkeys(_COUNTED, 0)), [answer for answer, _ in found]
        for _, cost in found:
            counts.update(cost)
        values = [self._read(answer) for answer in answers]
        counts["unreadable"] = values.count(None)
        if None in values:
            logger.warning(
                "%s: %d answers have no score: %.200r", self._field, values.count(None), answers[values.index(None)]
            )
        self._logged = Logged(len(values), {name: [float(count)] for name, count in counts.items()})
        self._logged.log_extra("answer", answers)
        return values

    def take_logged(self) -> Logged:
        """Return what the last call cost, once: requests and tokens, and the judge's answers."""
        logged, self._logged = self._logged, Logged()
        return logged

    def close(self) -> None:
        """End all requests."""
        if self._thread is not None:
            self._thread.close(self._session.close)

    def _answer_to(self, question: str) -> Future[Answer]:
        if not (begun := self._begun.get(question)):
            return self._submit(question)
        answer = begun.pop(0)
        if not begun:
            del self._begun[question]
        return answer

    def _submit(self, question: str) -> Future[Answer]:
        if self._thread is None:
            self._thread = LoopThread(self._field)
            self._thread.run(self._connect())
        return self._thread.submit(self._ask_patiently(question))

    async def _connect(self) -> None:
        """Open what all requests share; no more than `concurrency` of them are under way."""
        self._places = asyncio.Semaphore(self._config.concurrency)
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self._config.request_seconds),
            connector=aiohttp.TCPConnector(limit=self._config.concurrency),
            trust_env=True,
        )

    def _question(self, prompt: Prompt, completion: Completion) -> str:
        seen = asked(prompt, completion)
        text = seen if isinstance(seen, str) else "\n\n".join(map(_line, seen))
        named = prompt.columns | {"prompt": text, "completion": completion.text}
        return self._config.prompt_template.format_map(named)

    def _read(self, answer: str) -> float | None:
        found = next(reversed(self._score.findall(answer)), None)
        try:
            return None if found is None else float(found)
        except ValueError:
            return None

    async def _ask_patiently(self, question: str) -> Answer:
        counts: Counter[str] = Counter()
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(_AgainError),
            stop=stop_after_attempt(self._config.max_retries + 1),
            wait=self._wait,
            reraise=True,
        )
        async with self._places:
            return await attempts(self._ask, question, counts), counts

    def _wait(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        return max(self._backoff(state), error.after if isinstance(error, _AgainError) else 0.0)

    async def _ask(self, text: str, counts: Counter[str]) -> str:
        counts["requests"] += 1
        body = {"model": self._config.model, "messages": [{"role": "user", "content": text}]}
        try:
            async with self._session.post(self._url, json=self._config.params | body) as response:
                said = await response.text()
        except TimeoutError as error:
            raise _AgainError(
                f"{self._field}: {self._url} did not answer within {self._config.request_seconds} s; "
                "raise requestSeconds, or lower concurrency"
            ) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise _AgainError(f"{self._field}: no connection to {self._url}: {error}") from error
        if not response.ok:
            raise self._failure(response, said[:_ERROR_CHARS])
        return self._content(said, counts)

    def _content(self, said: str, counts: Counter[str]) -> str:
        try:
            values: Any = json.loads(said)
            content = values["choices"][0]["message"]["content"]
            usage = values.get("usage") or {}
            for name in ("prompt_tokens", "completion_tokens"):
                counts[name] += int(usage.get(name) or 0)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise RewardError(f"{self._field}: {self._url} answered without choices: {said[:_ERROR_CHARS]}") from error
        return content or ""

    def _failure(self, response: aiohttp.ClientResponse, text: str) -> Exception:
        what = f"{self._field}: {self._url} answered {response.status}: {text}"
        if response.status in _REFUSED:
            return ConfigError(f"{what}; check url, model and apiKeyEnv")
        if response.status not in _AGAIN and response.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return RewardError(what)
        after = response.headers.get("Retry-After", "")
        return _AgainError(what, float(after) if after.isdecimal() else 0.0)

    @property
    def _url(self) -> str:
        return f"{self._config.url.rstrip('/')}/chat/completions"


def _line(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part.get("text", "[image]") for part in content)
    return f"{message['role']}: {content}"


def _check_template(field: str, template: str, columns: Mapping[str, object]) -> None:
    known = {"prompt", "completion", *columns}
    try:
        named = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ConfigError(f"{field}: {error}; write {{{{ and }}}} for braces") from error
    if unknown := sorted(named - known):
        names = ", ".join(sorted(known))
        raise ConfigError(f"{field}: there is no {{{unknown[0]}}}; it may name {names}; write {{{{ and }}}} for braces")
