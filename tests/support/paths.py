"""Folders of this repository that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
CONVERT_INPUTS = ROOT / "tests" / "unit" / "cli" / "convert_inputs"
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
PROGRAMS = ROOT / "tests" / "trainer" / "programs"
RUN_FOLDER = ROOT / "tests" / "support" / "run_folder"
