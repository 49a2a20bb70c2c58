"""Environments: `fickle:Fickle` fails in some episodes, `fickle:gone` at once."""

import os
import random


class Fickle:
    """About a third of its episodes cannot begin, another third lack a connection."""

    def reset(self, **row: object) -> str:
        self.luck = random.randrange(3)
        if self.luck == 0:
            raise ValueError("no such level")
        if self.luck == 1:
            raise ConnectionError("the game's server is away")
        return " Go!"

    def look(self) -> str:
        """Look around."""
        return "nothing"


def gone() -> None:
    os._exit(3)
