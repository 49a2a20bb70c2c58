"""NeMo-Gym in a program: servers of tools, of the agent and of the model, in one process of a Python of their own.

NEMO_GYM_PYTHON is an interpreter that has nemo-gym: 0.4.0 wants Python 3.12, which the image has not. It runs this file
as a program, with the ports of the three. NeMo-Gym's own command would start a Ray cluster, too, which they do not use.
"""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import httpx


def started():
    """Start the servers once for all episodes of this process's forks; returns the agent's address."""
    with ExitStack() as stack:
        trials = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [trial.getsockname()[1] for trial in trials]
    # With the pipe's last writer, an end of this process, the servers end too. -EP: PYTHONPATH is of the other Python,
    # and this folder has a nemo_gym, too.
    command = [os.environ["NEMO_GYM_PYTHON"], "-EP", __file__, *map(str, ports)]
    servers = subprocess.Popen(command, stdin=subprocess.PIPE)
    for port in ports:
        while servers.poll() is None:
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
    if servers.poll() is not None:
        raise RuntimeError(f"the servers ended with {servers.returncode}")
    return servers, f"http://127.0.0.1:{ports[0]}"


def play(row, **endpoint):
    """Run the agent on a row of NeMo-Gym's, which is JSON in the column `gym`; returns what `verify` gives."""
    asks = json.loads(row["gym"])
    asks["responses_create_params"]["metadata"] = endpoint
    answer = httpx.post(f"{URL}/run", json=asks, timeout=None)  # the gateway's limits count
    if answer.is_error:
        raise RuntimeError(answer.text)  # has what the gateway refused, and why
    return answer.json()["reward"]


def serve(ports):
    """Serve until standard input ends."""
    import asyncio
    import threading

    import uvicorn
    from nemo_gym import server_utils as gym
    from nemo_gym.openai_utils import NeMoGymAsyncOpenAI
    from omegaconf import OmegaConf
    from resources_servers.example_single_tool_call.app import SimpleWeatherResourcesServer
    from responses_api_agents.simple_agent.app import SimpleAgent
    from responses_api_models.vllm_model.app import VLLMModel

    class EpisodeModel(VLLMModel):
        """A model server that asks the endpoint of the episode, which is the request's metadata."""

        def _preprocess_chat_completion_create_params(self, request, body_dict):
            endpoint = body_dict.pop("metadata")
            request.state.client = NeMoGymAsyncOpenAI(base_url=endpoint["base_url"], api_key=endpoint["api_key"])
            return super()._preprocess_chat_completion_create_params(request, body_dict) | {"model": endpoint["model"]}

        def _resolve_client(self, request):
            return request.state.client

    others = {
        f"{one}_server": {"type": kind, "name": one}
        for one, kind in (("resources", "resources_servers"), ("model", "responses_api_models"))
    }
    settings: dict[str, Any] = {"base_url": "", "api_key": "", "model": ""}  # the episode's instead
    settings |= {"return_token_id_information": False, "uses_reasoning_parser": False}  # thoughts stay in the text
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "agent": (SimpleAgent, others),
        "resources": (SimpleWeatherResourcesServer, {"domain": "agent"}),
        "model": (EpisodeModel, settings),
    }
    places = {
        name: {"name": name, "entrypoint": "app.py", "host": "127.0.0.1", "port": port}
        for name, port in zip(kinds, ports, strict=True)
    }
    client = gym.ServerClient(
        head_server_config=gym.BaseServerConfig(host="127.0.0.1", port=0),  # is not there, and not asked
        global_config_dict=OmegaConf.create({name: {"kind": {"own": place}} for name, place in places.items()}),
    )

    async def run():
        gym.set_global_aiohttp_client(gym.GlobalAIOHTTPAsyncClientConfig())
        running = []
        for name, (kind, more) in kinds.items():
            server = kind(config=places[name] | more, server_client=client)
            app = server.setup_webserver()
            server.setup_exception_middleware(app)  # an agent's error has the text of the model's
            config = uvicorn.Config(app, host="127.0.0.1", port=places[name]["port"], log_level="warning")
            running.append(uvicorn.Server(config).serve())
        await asyncio.gather(*running)

    threading.Thread(target=lambda: os._exit(len(sys.stdin.read())), daemon=True).start()
    asyncio.run(run())


if __name__ == "__main__":
    serve(map(int, sys.argv[1:]))
else:
    SERVERS, URL = started()
