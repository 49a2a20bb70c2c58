"""An engine without a model, which joins transfer groups and receives weights: light_engine.py PORT NAME FOLDER HOW.

NAME is the name of its process. It writes the sum of all weights that it has received to FOLDER/NAME-VERSION. While
there is a file FOLDER/NAME.stuck, it does not come when it is asked to join, but answers all else; with NAME.deaf, it
receives no piece; with NAME.silent, it answers no call of a push; with NAME.nameless, it is healthy, but answers no
question about its process. HOW is "joins", or "only-comes": then it meets the
sender, but joins no group.
"""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from grpo_workload.generation.gloo_group import GlooGroup
from grpo_workload.generation.roll_call import Invitation, Seat, open_store
from grpo_workload.weights.digest import SUMS
from grpo_workload.weights.wire import empty, parse_description, pieces, unpack

port, name, folder, how = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
state: dict[str, Any] = {}


def _wait(state: str) -> None:
    while (folder / f"{name}.{state}").exists():
        time.sleep(0.05)


async def fine(_: web.Request) -> web.Response:
    return web.json_response({"world_size": 1, "data": [{"id": name}]})


async def named(request: web.Request) -> web.Response:
    await asyncio.to_thread(_wait, "nameless")
    return await fine(request)


async def pause(request: web.Request) -> web.Response:
    await asyncio.to_thread(_wait, "silent")
    return await fine(request)


async def version(_: web.Request) -> web.Response:
    return web.json_response({"weight_version": state.get("version", "default")})


async def join(request: web.Request) -> web.Response:
    await asyncio.to_thread(_join, Invitation(**(await request.json())["init_info"]))
    return web.json_response({})


def _join(invitation: Invitation) -> None:
    _wait("stuck")
    store = open_store(invitation.host, invitation.port, timeout_seconds=invitation.patience)
    seat = state["seat"] = Seat(store, invitation.meeting, invitation.rank_offset)
    seat.check_in()
    if how == "only-comes":
        return
    state["group"] = GlooGroup(
        store,
        rank=invitation.rank_offset,
        world_size=invitation.world_size,
        meeting=invitation.meeting,
        timeout_seconds=invitation.patience,
    )


async def update(request: web.Request) -> web.Response:
    info = (await request.json())["update_info"]
    await asyncio.to_thread(_receive, info)
    return web.json_response({})


def _receive(info: dict[str, Any]) -> None:
    specs = parse_description(info["names"], info["dtype_names"], info["shapes"])
    total = 0.0
    for piece in pieces(specs, info["piece_bytes"]):
        bytes_N = empty(piece, "cpu")
        _wait("deaf")
        state["group"].broadcast(bytes_N)
        state["seat"].count_piece()
        total += sum(float(tensor.sum()) for name, tensor in unpack(bytes_N, piece) if name != SUMS)
    state["sum"] = total


async def finish(request: web.Request) -> web.Response:
    state["version"] = (await request.json())["weight_version"]
    if "sum" in state:
        (folder / f"{name}-{state['version']}").write_text(str(state["sum"]))
    return web.json_response({})


async def metrics(_: web.Request) -> web.Response:
    return web.Response(text='vllm:num_requests_running{engine="0"} 0.0\n')


app = web.Application()
app.add_routes([web.get(path, fine) for path in ("/health", "/get_world_size")])
app.add_routes([web.get("/v1/models", named)])
app.add_routes([web.get("/metrics", metrics), web.get("/weight_info", version)])
app.add_routes([web.post(path, fine) for path in ("/resume", "/start_weight_update")])
app.add_routes([web.post("/pause", pause)])
app.add_routes([web.post("/init_weight_transfer_engine", join), web.post("/update_weights", update)])
app.add_routes([web.post("/finish_weight_update", finish)])
web.run_app(app, host="127.0.0.1", port=port, print=None)
