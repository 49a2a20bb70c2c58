"""Reports what a program measured to its test, which holds the assertions: `run_program` returns it, rank by rank."""

import json
import os
from pathlib import Path


def report(result):
    """Write this rank's result, anything that JSON can hold, for the test."""
    Path(os.environ["RESULTS"], f"result-{os.environ['RANK']}.json").write_text(json.dumps(result))


def error_of(action, *arguments, **named):
    """Call `action` and return its exception as [name of the type, message], or None if it raises none."""
    try:
        action(*arguments, **named)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None
