"""Runs that a page shows beside its own."""

import json
import shutil
from pathlib import Path

from aiohttp import ClientSession

from grpo_cli.ui import server
from grpo_cli.ui.folder import FolderSource
from grpo_cli.ui.others import Others
from grpo_cli.ui.source import Source
from support.paths import RUN_FOLDER as RUN


async def test_other_runs_are_begun_when_they_are_chosen(tmp_path: Path) -> None:
    begun: list[str] = []

    def begin(name: str) -> Source:
        begun.append(name)
        return FolderSource(tmp_path / name)

    others = Others(lambda: ["other", "gone"], begin)
    shutil.copytree(RUN, tmp_path / "other")
    async with server.serving(FolderSource(RUN), 0, None, others) as address, ClientSession() as session:

        async def get(path: str) -> tuple[int, str]:
            async with session.get(address + path) as answer:
                return answer.status, await answer.text()

        assert await get("api/others") == (200, '["other", "gone"]')
        async with session.get(f"{address}api/curves?run=other", headers={"Sec-Fetch-Site": "cross-site"}) as answer:
            assert answer.status == 403, "a page of another site starts no pods"
        assert begun == []
        for _ in range(2):
            status, text = await get("api/curves?run=other")
            assert status == 200
            assert [row["step"] for row in json.loads(text)["metrics"]] == list(range(8))
        assert begun == ["other"]
        status, text = await get("api/curves?run=gone")
        assert (status, "does not exist" in text) == (404, True)
        assert await get("api/curves?run=../secret") == (404, "there is no run ../secret to compare with")
    async with server.serving(FolderSource(RUN), 0) as address, ClientSession() as session:
        assert await get("api/others") == (200, "[]")
