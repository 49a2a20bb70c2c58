"""Environments: `fickle:Fickle` fails in some episodes, `fickle:gone` at once, `fickle:Drawn` if its pod does."""

import os
import random
import time


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


class Drawn:
    """Its reward is drawn when it begins, which takes a while; FOLDER/begun says that one has."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def reset(self, **row: object) -> None:
        self.drawn = random.random()
        open(f"{self.folder}/begun", "w").close()
        time.sleep(1)

    def get_reward(self) -> float:
        return self.drawn


def gone() -> None:
    os._exit(3)
