"""Two ranks lose their engines, which are fake: both wait and push together, or name the engine that stays away."""

import json
from pathlib import Path

import pytest

from support.paths import PROGRAMS
from support.trainer.engines import make_contract, with_ranks
from support.trainer.launchers import eventually


@pytest.fixture
def start_engine(start_program, tmp_path):
    """Function start_engine(engine, process, how), where `how` is "answers" or "hangs"."""

    def start(engine, process, how):
        return start_program("fake_engine.py", engine.port, process, tmp_path / f"asked-{process}", how)

    return start


def contract_of(folder, *, timeout):
    """Write and return a contract of two ranks and two engines that get no weights."""
    contract = with_ranks(make_contract(Path("/nowhere"), [(1, 1), (1, 1)], restarts=True, timeout=timeout), 2)
    contract = contract.model_copy(update={"transfers": ()})
    (folder / "contract.json").write_text(contract.model_dump_json(by_alias=True))
    return contract


def lose_all(contract, start_engine, start_ranks, folder):
    """Start ranks and kill both engines while each works on a prompt of rank 1; return the ranks."""
    running = [start_engine(engine, f"{engine.name}.1", "hangs") for engine in contract.engines]
    ranks = start_ranks([str(PROGRAMS / "restart_ranks.py"), str(folder)], 2)
    ranks.until(lambda: all((folder / f"asked-{engine.name}.1").exists() for engine in contract.engines))
    for engine in running:
        engine.kill()
        engine.wait()
    return ranks


def test_a_rank_without_prompts_waits_with_the_rank_whose_engines_are_lost(tmp_path, start_engine, start_ranks):
    contract = contract_of(tmp_path, timeout=60)
    ranks = lose_all(contract, start_engine, start_ranks, tmp_path)
    for engine in contract.engines:
        start_engine(engine, f"{engine.name}.2", "answers")

    assert ranks.exit_codes() == [0, 0], ranks.logs()
    idle, busy = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert idle == {"pushes": [2], "tokens": []}
    assert busy == {"pushes": [2], "tokens": [[[index, index]] * 2 for index in range(6)]}


def test_an_engine_that_does_not_come_back_is_named_on_every_rank(tmp_path, start_engine, start_ranks):
    contract = contract_of(tmp_path, timeout=3)
    ranks = lose_all(contract, start_engine, start_ranks, tmp_path)
    start_engine(contract.engines[0], "engine-0.2", "answers")

    eventually(lambda: all(process.poll() is not None for process in ranks.processes), "the ranks end")
    for rank in range(2):
        engine = f"engine engine-1 (pod engine-1, 127.0.0.1:{contract.engines[1].port})"
        lost = f"{engine} was lost and not healthy again within 6 s: it lost or refused the connection"
        assert lost in ranks.error(rank)
