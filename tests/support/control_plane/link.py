"""A TCP connection to the API server that can be frozen and cut."""

import asyncio
from typing import Self
from urllib.parse import urlsplit

from kubernetes.aio import client, config

from grpo_devcluster.controlplane import ControlPlane


class Link:
    """Forwards connections to the API server. As a context manager it listens on entry."""

    def __init__(self, plane: ControlPlane) -> None:
        server = urlsplit(plane.endpoints.server)
        self._kubeconfig, self._host, self._port = plane.kubeconfig, server.hostname, server.port
        self._open = asyncio.Event()
        self._open.set()
        self._ends: set[asyncio.StreamWriter] = set()
        self._forwards: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        configuration = client.Configuration()
        await config.load_kube_config(str(self._kubeconfig), client_configuration=configuration)
        configuration.host = f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self.api = client.ApiClient(configuration)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.api.close()
        self._server.close()
        self._open.set()
        self.cut()
        await asyncio.gather(*self._forwards)

    def freeze(self) -> None:
        """Forward no byte any more, and refuse none."""
        self._open.clear()

    def cut(self) -> None:
        """Break all connections; new ones work."""
        for end in self._ends:
            end.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._forwards.add(task)
        back, forth = await asyncio.open_connection(self._host, self._port)
        self._ends |= {writer, forth}
        await asyncio.gather(self._copy(reader, forth), self._copy(back, writer), return_exceptions=True)
        self._ends -= {writer, forth}

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            await self._open.wait()
            target.write(data)
            await target.drain()
        target.close()
