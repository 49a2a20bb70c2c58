"""The tool of `agents.py`: a query of an SQLite database in memory, which takes as long as the call says."""

from __future__ import annotations

import sqlite3
import time
from functools import cache

ROWS = 2000


def query(sql: str, milliseconds: int) -> str:
    """
    Query the database.

    Args:
        sql: A query in SQL.
        milliseconds: How long the database takes.
    """
    time.sleep(milliseconds / 1000)
    return answer(sql)


def answer(sql: str) -> str:
    """Return the rows that a query finds, as text."""
    return "\n".join(" | ".join(map(str, row)) for row in _database().execute(sql))


@cache
def _database() -> sqlite3.Connection:
    database = sqlite3.connect(":memory:", check_same_thread=False)
    database.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT)")
    database.executemany("INSERT INTO items VALUES (?, ?)", ((number, f"item {number:04d}") for number in range(ROWS)))
    return database
