"""One thread: these models are so small that threads cost more than they save. And slices that fit them."""

from collections.abc import Iterator

import pytest
import torch

from grpo_workload.policy.logprobs import kept_words, logprobs


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def small_slices() -> Iterator[None]:
    """The head computes a small vocabulary in several slices, of words and of rows."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(logprobs, "WORDS", 104)
    monkeypatch.setattr(kept_words, "LOGITS", 600)  # two rows at a time
    yield
    monkeypatch.undo()
