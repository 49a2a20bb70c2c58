"""Code of a job with the tool of examples/calculator and an environment beside it, named as `calculated:function`."""

import importlib
import random
import sys
from typing import Any

from support.paths import EXAMPLES

sys.path.insert(0, str(EXAMPLES / "calculator"))

calculator = importlib.import_module("calculator")
multiply, prepare, right = calculator.multiply, calculator.prepare, calculator.right


class Paper:
    """Asks for the tool with more or fewer marks, which are its reward, and keeps what is written on it."""

    def reset(self, answer: str, **row: object) -> str:
        self.product, self.marks = answer, random.randint(1, 9)
        self.lines: list[str] = []
        return " Call the tool" + "!" * self.marks

    def write(self, line: str) -> str:
        """Write a line.

        Args:
            line: What to write.
        """
        self.lines.append(line)
        return "written"

    def get_reward(self) -> float:
        return self.marks / 10


def seen(environments: list[Any], completion_ids: list[list[int]], answer: list[str], **_: object) -> list[float]:
    """Return 10 x lines + marks of what is left of each environment, or -1 if it is of another row; less its tokens."""
    return [
        (10 * len(one.lines) + one.marks if one.product == product else -1) - len(tokens) / 1000
        for one, product, tokens in zip(environments, answer, completion_ids, strict=True)
    ]
