"""Objects that stay as long as the process does, such as those of programs: no garbage is looked for among them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_objects() -> Iterator[None]:
    """Look for no garbage while the context is open, and later not among the objects that exist when it closes.

    A rank loads its programs in it: the collector would take a seventh of that time, as it goes through all that is
    loaded again and again, and 0.2 s of a step now and then.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
