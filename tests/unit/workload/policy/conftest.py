"""Slices of the head that fit these small models."""

import pytest

from grpo_workload.policy.logprobs import kept_words, logprobs


@pytest.fixture(scope="module")
def small_slices():
    """The head computes a small vocabulary in several slices, of words and of rows."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(logprobs, "WORDS", 104)
    monkeypatch.setattr(kept_words, "LOGITS", 600)  # two rows at a time
    yield
    monkeypatch.undo()
