"""The HTTP side of an engine, without a model: fake_engine.py PORT NAME MARK HOW.

NAME is the name of its process. MARK is a file that it touches when it is asked for a completion. HOW is "answers", or
anything else for an engine that never answers with a completion.
"""

import asyncio
import sys
from pathlib import Path

from aiohttp import web

port, name, mark, answers = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4] == "answers"


async def fine(_: web.Request) -> web.Response:
    return web.json_response({"world_size": 1, "data": [{"id": name}]})


async def complete(request: web.Request) -> web.Response:
    asked = await request.json()
    if asked["model"] != name:
        return web.Response(status=404)
    await asyncio.to_thread(mark.touch)
    if not answers:
        await asyncio.Event().wait()
    tokens = [*asked["prompt"], asked["seed"]]
    choice = {"text": "", "token_ids": tokens, "logprobs": {"token_logprobs": [-1.0, -1.0]}, "finish_reason": "stop"}
    return web.json_response({"choices": [choice | {"index": index} for index in range(asked["n"])]})


app = web.Application()
app.add_routes([web.get(path, fine) for path in ("/health", "/get_world_size", "/v1/models")])
app.add_routes([web.post("/v1/completions", complete)])
web.run_app(app, host="127.0.0.1", port=port, print=None)
