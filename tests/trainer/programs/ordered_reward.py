"""A reward that hangs on the rank that a file names; on all others it is one that random weights can earn."""

import os
import threading
from pathlib import Path


def slow(prompts, completions, completion_ids, **columns):
    order = Path(os.environ["ORDER"])
    if order.exists() and order.read_text() == os.environ["RANK"]:
        threading.Event().wait()
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
