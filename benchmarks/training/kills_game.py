"""The environment of `kills.py`, and a tokenizer by which a model of random weights calls it."""

from __future__ import annotations

import random
import time

STOPS = "abcdefgh"
"""Texts that end a turn: a random model samples one of them after about 30 tokens."""
CALLS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"[A-Z]",
            "close_pattern": f"(?=[{STOPS}])",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "look", "arguments": {"text": "{content}"}}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""Response template: a turn with a large letter is a call, with what follows the letter."""
SECONDS = 0.03
"""Seconds that each call takes, so that kills hit episodes."""


class Game:
    """Its reward and what it says depend on all calls, and on random numbers that it draws."""

    def reset(self, **row: object) -> str:
        """Draw the number to begin with."""
        time.sleep(SECONDS)
        self._state = random.randrange(97)
        return f" Begin with {self._state}."

    def look(self, text: str) -> str:
        """
        Look at something.

        Args:
            text: What to look at.
        """
        time.sleep(SECONDS)
        self._state = (self._state + sum(map(ord, text)) + random.randrange(97)) % 97
        return str(self._state)

    def get_reward(self) -> float:
        """Return a number from 0 to 1."""
        time.sleep(SECONDS)
        return self._state / 97
