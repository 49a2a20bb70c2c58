"""`ConfigError`: the one exception that means a user's mistake. Torch-free."""

from __future__ import annotations


class ConfigError(ValueError):
    """A mistake that the user has to fix: the message names the field, what is wrong, and what would work.

    It ends the job, since another attempt would meet it again. Any other exception is a failure, which may be tried
    again: a plain ValueError, too, because libraries and faults of our own raise it.
    """
