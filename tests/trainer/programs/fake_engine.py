"""The HTTP side of an engine, without a model: fake_engine.py PORT NAME MARK HOW.

NAME is the name of its process. MARK is a file to which it adds each request for a completion, a line of JSON. HOW is
what it does then: "answers"; "hangs"; "once": it answers once and then hangs; "dies": it answers once and then ends;
"slow": it answers after LOOKS looks at its metrics, which say each time that a token was sampled.
"""

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

port, name, mark, how = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
LOOKS = 40
requests, looks, is_done = itertools.count(1), itertools.count(1), asyncio.Event()


async def fine(_: web.Request) -> web.Response:
    return web.json_response({"world_size": 1, "data": [{"id": name}]})


def note(asked: dict[str, Any]) -> None:
    with mark.open("a") as file:
        file.write(json.dumps(asked) + "\n")


async def complete(request: web.Request) -> web.Response:
    asked = await request.json()
    if asked["model"] != name:
        return web.Response(status=404)
    await asyncio.to_thread(note, asked)
    is_first = next(requests) == 1
    if how == "dies" and not is_first:
        os._exit(1)
    if how == "hangs" or (how == "once" and not is_first):
        await asyncio.Event().wait()
    if how == "slow":
        await is_done.wait()
    tokens = [*asked["prompt"], asked["seed"]]
    logprobs = {"token_logprobs": [-1.0] * len(tokens)}
    choice = {"text": "", "token_ids": tokens, "logprobs": logprobs, "finish_reason": "stop"}
    return web.json_response({"choices": [choice | {"index": index} for index in range(asked["n"])]})


async def metrics(_: web.Request) -> web.Response:
    tokens = next(looks) if how == "slow" else 0
    if tokens == LOOKS:
        is_done.set()
    gauges = f'vllm:num_requests_running{{engine="0"}} 1.0\nvllm:generation_tokens_total{{engine="0"}} {tokens}\n'
    return web.Response(text=f"# HELP vllm:num_requests_running Number.\n{gauges}")


app = web.Application()
app.add_routes([web.get(path, fine) for path in ("/health", "/get_world_size", "/v1/models")])
app.add_routes([web.get("/metrics", metrics)])
app.add_routes([web.post("/v1/completions", complete)])
web.run_app(app, host="127.0.0.1", port=port, print=None)
