"""Completions that end at a text, compared with the whole ones of the same seeds."""

import math
import re


def word_in(completions):
    """Return a visible character that the text of a completion has."""
    return next(found[0] for one in completions if (found := re.search(r"[!-~]", one.text)))


def are_stopped(whole, stopped, word):
    """Whether completions end with the token that completes `word`, and at least one does."""
    ended = [cut for cut in stopped if cut.text.endswith(word) and cut.finish_reason == "stop"]
    return bool(ended) and all(_is_stopped(*pair, word) for pair in zip(whole, stopped, strict=True))


def _is_stopped(whole, cut, word):
    count = len(cut.token_ids)
    is_prefix = cut.token_ids == whole.token_ids[:count] and len(cut.logprobs) == count
    is_prefix &= all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(cut.logprobs, whole.logprobs, strict=False))
    if word not in whole.text:
        return is_prefix and (cut.text, count, cut.finish_reason) == (
            whole.text,
            len(whole.token_ids),
            whole.finish_reason,
        )
    return is_prefix and (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(word) + len(word)], "stop")
