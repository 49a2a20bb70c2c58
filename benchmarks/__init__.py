"""Measurements; each is run as a module from the repository's root: `python -m benchmarks.ROOM.NAME`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Models and servers that tests make serve benchmarks, too; the devcluster is not part of the distribution.
sys.path += [str(ROOT / "tests"), str(ROOT / "devcluster")]
