"""Words that sampling keeps: transformers' own min-p, top-k and top-p in vLLM's order give the same words."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.truncation import Truncation

TRUNCATIONS = st.builds(
    Truncation,
    temperature=st.sampled_from([0.01, 0.6, 1.0, 3.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 20, 64, 1000]),
    top_p=st.sampled_from([1e-6, 0.3, 0.7, 0.95, 1.0]),
)


def logits(seed, *, dtype=torch.float32, spread=3.0):
    random = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(5, 64, generator=random)).to(dtype)


def as_transformers(logits_KV, truncation):
    scores = logits_KV.float() / truncation.temperature
    warpers = LogitsProcessorList()
    warpers += [MinPLogitsWarper(truncation.min_p)] if truncation.min_p else []
    warpers += [TopKLogitsWarper(truncation.top_k)] if truncation.top_k else []
    warpers += [TopPLogitsWarper(truncation.top_p)] if truncation.top_p < 1 else []
    return warpers(None, scores) > -torch.inf


@given(seed=st.integers(0, 10**6), truncation=TRUNCATIONS, spread=st.sampled_from([0.1, 1.0, 3.0]))
def test_the_kept_words_are_those_of_transformers(seed, truncation, spread):
    logits_KV = logits(seed, spread=spread)
    assert truncation.kept(logits_KV).equal(as_transformers(logits_KV, truncation))


@given(seed=st.integers(0, 10**6), truncation=TRUNCATIONS)
@example(seed=0, truncation=Truncation(1.0, top_p=1e-6))
def test_with_ties_the_kept_words_have_the_same_probability(seed, truncation):
    """In bfloat16 many words are equally likely, and which of them come first is nobody's business."""
    logits_KV = logits(seed, dtype=torch.bfloat16)
    kept, expected = truncation.kept(logits_KV), as_transformers(logits_KV, truncation)
    scores = logits_KV.float() / truncation.temperature
    assert kept.sum(dim=1).equal(expected.sum(dim=1))
    for ours, theirs, row in zip(kept, expected, scores, strict=True):
        torch.testing.assert_close(row[ours].logsumexp(0), row[theirs].logsumexp(0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{}, {"top_p": 1.0, "top_k": 0, "min_p": 0.0}])
def test_a_whole_vocabulary_is_no_truncation(options):
    assert Truncation.of(TrainingConfig(**options)) is None


@pytest.mark.parametrize("options", [{"top_p": 0.7}, {"top_k": 20}, {"min_p": 0.1}])
def test_each_field_is_a_truncation_at_the_temperature(options):
    assert Truncation.of(TrainingConfig(temperature=0.6, **options)) == Truncation(0.6, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.009])
def test_temperatures_that_vllm_would_change_are_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        TrainingConfig(temperature=temperature)
