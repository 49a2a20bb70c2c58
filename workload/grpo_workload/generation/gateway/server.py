"""The gateway's HTTP: OpenAI's chat completions and responses on loopback, for the programs beside this rank.

It listens while episodes are played. Each has a key of its own, which says whose turn is asked for.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from grpo_spec.training import TrainingConfig
from grpo_workload.environments.requests import LOOPBACK, Endpoint
from grpo_workload.generation.gateway.chat import Chat
from grpo_workload.generation.gateway.program_episode import ProgramEpisode
from grpo_workload.generation.gateway.refusal import RefusalError
from grpo_workload.generation.gateway.responses import Responses

_MAX_BODY = 64 << 20  # bytes: more than the longest context has as text
_CLOSING_SECONDS = 1.0


class GatewayServer:
    """Answers programs' requests; used in one event loop at a time."""

    def __init__(self, training: TrainingConfig, model: str) -> None:
        """`training`: how tokens are sampled; `model`: the name under which programs ask for it."""
        self._training, self._model = training, model
        self._episodes: dict[str, ProgramEpisode] = {}  # by key
        self._runner: web.AppRunner | None = None
        self._base_url = ""
        self._numbers = itertools.count(1)
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def serve(self, episode: ProgramEpisode) -> AsyncIterator[Endpoint]:
        """Answer the episode's requests in the body; the endpoint has its key."""
        key = secrets.token_urlsafe(24)
        self._episodes[key] = episode
        try:
            async with self._lock:
                if self._runner is None:
                    await self._open()
            yield Endpoint(base_url=self._base_url, api_key=key, model=self._model)
        finally:
            del self._episodes[key]
            async with self._lock:
                if not self._episodes and self._runner is not None:
                    runner, self._runner = self._runner, None
                    await runner.cleanup()

    async def _open(self) -> None:
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/responses", self._complete)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSING_SECONDS)
        await runner.setup()
        await web.TCPSite(runner, LOOPBACK, 0, backlog=1024).start()
        self._runner, self._base_url = runner, f"http://{LOOPBACK}:{runner.addresses[0][1]}/v1"

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._episode_of(request)
        except RefusalError as error:
            return _refuse(error)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "grpo"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            episode = self._episode_of(request)
            sent = await _body(request)
            asks = self._asks(request, episode)
            asked = asks.read(_parsed(sent))
            answer = await episode.answer(asked, sent, is_repeated=_is_repeated(request))
        except RefusalError as error:
            return _refuse(error)
        except asyncio.CancelledError:  # the episode has ended, not this request
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return _refuse(RefusalError("the episode has ended", code="episode_ended", status=401))
        except Exception:  # `play` raises it; a client must not take it for an answer, or ask again
            return _refuse(RefusalError("the model cannot be asked any more", code="engine_failed", status=500))
        if not asked.streams:
            return web.json_response(asks.whole(answer))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in asks.events(answer):
            await response.write(event)
        await response.write_eof()
        return response

    def _asks(self, request: web.Request, episode: ProgramEpisode) -> Chat | Responses:
        head = {"id": next(self._numbers), "created": int(time.time())}
        if request.path.endswith("/responses"):
            return Responses(self._training, self._model, episode.responses, head)
        return Chat(self._training, self._model, head)

    def _episode_of(self, request: web.Request) -> ProgramEpisode:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer" or (episode := self._episodes.get(key.strip())) is None:
            text = "this is no key of an episode that is played now: each episode gets its own as api_key"
            raise RefusalError(text, code="invalid_api_key", status=401)
        return episode


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        text = f"the body has more than {_MAX_BODY} bytes"
        raise RefusalError(text, code="invalid_value", status=413) from error


def _parsed(sent: bytes) -> Any:
    try:
        return json.loads(sent)
    except (ValueError, RecursionError) as error:
        raise RefusalError(f"the body is no JSON: {error}", code="invalid_value") from error


def _is_repeated(request: web.Request) -> bool:
    """Whether the client says that it sends it again, as OpenAI's do."""
    return request.headers.get("x-stainless-retry-count", "0") != "0"


def _refuse(error: RefusalError) -> web.Response:
    # OpenAI's clients would try again what will not change.
    return web.json_response(error.body(), status=error.status, headers={"x-should-retry": "false"})
