"""docs/comparison.md is what cells.yaml and the stored look-up say; a quote that is not there, or a hit, is named."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.comparison import check, page
from benchmarks.comparison.cells import FILE, NO, RESULTS, Cell, Row, Source, load

from support.paths import ROOT

SOURCES, TABLES = load()
ROWS = [row for rows in TABLES.values() for row in rows]
CELLS = [cell for row in ROWS for cell in row.cells]


def test_the_page_is_of_the_file_and_of_what_was_found() -> None:
    filled = page.fill(page.PAGE.read_text(), RESULTS.read_text())
    assert page.PAGE.read_text() == filled, "run `python -m benchmarks.comparison.page`"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda lines: lines[:-1], "Kueue.*, NeMo-RL: run"),
        (lambda lines: [one.replace("gmpo_trainer.py", "g.py") for one in lines], "GMPO, TRL: run"),
        (lambda lines: [one.replace('"says": "CISPO"', '"says": "✓"') for one in lines], "CISPO, SAPO, NeMo-RL: run"),
    ],
)
def test_a_cell_that_nobody_has_looked_up_is_named(change: Callable[[list[str]], list[str]], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        page.fill(page.PAGE.read_text(), "\n".join(change(RESULTS.read_text().splitlines())))


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.source.package], ids=lambda cell: cell.row)
def test_cells_about_an_installed_package_are_so(cell: Cell) -> None:
    check.look_up(cell, check.Package(cell.source))


def test_what_was_sought_in_vain_is_what_others_or_we_call_it() -> None:
    """An expression that matches nothing anywhere would prove nothing."""
    folders = (ROOT / name for name in ("spec", "operator", "workload", "cli"))
    ours = [file.read_text() for folder in folders for file in folder.rglob("*.py")]
    for row in ROWS:
        quotes = "\n".join([row.name, *(f"{path} {text}" for cell in row.cells for path, text in cell.proofs)])
        for sought in {cell.nowhere for cell in row.cells if cell.nowhere}:
            assert any(re.search(sought, text, re.IGNORECASE) for text in [quotes, *ours]), f"{row.name}: {sought}"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("      verl: [✓, verl/trainer/ppo/core_algos.py, '@register_policy_loss(\"gspo\")']\n", "", "columns are"),
        ("      sought: 'curricul'\n", "", f"curricula, OpenRLHF: {NO} needs `sought`"),
        (", class CurriculumConfig]", "]", "curricula, prime-rl: use .what the page says"),
        ("class CurriculumConfig", "x" * 121, "curricula, prime-rl: quote at most 120"),
    ],
)
def test_a_cell_without_a_proof_is_refused(old: str, new: str, message: str) -> None:
    text = FILE.read_text()
    assert text.count(old) == 1
    with pytest.raises(ValueError, match=message):
        load(text.replace(old, new))


def _repository(folder: Path) -> str:
    """Make a repository whose one file has two lines, and return its commit."""
    (folder / "src").mkdir(parents=True)
    (folder / "src/loss.py").write_text("def loss():\n    clip_ratio = 0.2\n")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "a"], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def mirror(tmp_path: Path) -> check.Mirror:
    commit = _repository(tmp_path / "them+it")
    return check.Mirror(Source("It", "them/it", commit, "2026-01-01", ("src",)), tmp_path)


def _cell(proof: tuple[str, str] | None = None, nowhere: str | None = None, path: str = "src") -> Cell:
    source = Source("It", "them/it", "c", "2026-01-01", ("src",))
    return Cell("Algorithm", "clipping", source, "✓", (proof,) if proof else (), nowhere, (path,))


def test_the_line_of_a_quote_is_stored(mirror: check.Mirror) -> None:
    (found,) = check.look_up(_cell(("src/loss.py", "clip_ratio")), mirror)["at"]
    assert found == {"path": "src/loss.py", "line": 2, "text": "clip_ratio"}
    assert check.look_up(_cell(nowhere="eps_clip"), mirror)["nowhere"] == "eps_clip"


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (_cell(("src/loss.py", "eps_clip")), "clipping, It .✓.: src/loss.py does not say: eps_clip"),
        (_cell(("src/gone.py", "clip")), "clipping, It .✓.: src/gone.py is not there"),
        (_cell(nowhere="CLIP_.*RATIO"), "clipping, It .✓.: CLIP_.*RATIO is in src/loss.py:2"),
        (_cell(nowhere="eps_clip", path="lib"), "lib: no such path"),
        (_cell(nowhere="("), "git grep"),
    ],
)
def test_a_cell_that_is_not_so_is_named(cell: Cell, message: str, mirror: check.Mirror) -> None:
    with pytest.raises(ValueError, match=message):
        check.look_up(cell, mirror)


def test_a_commit_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"It: .*them\+it has no commit c; --fetch gets it"):
        check.tree(Source("It", "them/it", "c", "2026-01-01", ("src",)), tmp_path)


def test_a_commit_that_is_not_there_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = _repository(tmp_path / "github/them/it")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{(tmp_path / 'github').as_uri()}/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://github.com/")
    files = check.tree(Source("It", "them/it", commit, "2026-01-01", ("src",)), tmp_path / "mirrors", fetch=True)
    assert check.look_up(_cell(("src/loss.py", "clip_ratio")), files)["at"]


def test_every_row_links_to_tests_unless_it_is_not_here() -> None:
    without: list[Row] = [row for row in ROWS if not row.tests]
    assert {row.here for row in without} <= {NO, "vLLM's option, untried"}
