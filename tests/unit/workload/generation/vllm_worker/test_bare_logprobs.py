"""Requests that ask for bare log-probabilities get the same numbers without strings; all others stay as they are."""

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from grpo_workload.generation.vllm_api import BARE
from grpo_workload.generation.vllm_worker import bare_logprobs
from support.trainer.tiny_model import make_tiny_tokenizer


class Request:
    def __init__(self, **settings):
        self.sampling_params = SamplingParams(**settings)


@pytest.fixture
def processor(monkeypatch):
    """Function processor(**sampling parameters): vLLM's processor after it was given two tokens."""
    monkeypatch.setattr(LogprobsProcessor, "from_new_request", LogprobsProcessor.from_new_request)
    bare_logprobs.register()
    bare_logprobs.register()

    def make(**settings):
        found = LogprobsProcessor.from_new_request(make_tiny_tokenizer(), Request(**settings))
        for token, logprob in ((40, -0.5), (41, -1.5)) if settings.get("logprobs") is not None else ():
            lists = LogprobsLists(np.array([[token]]), np.array([[logprob]]), np.array([3]), None)
            found._update_sample_logprobs(lists)
        return found

    return make


def test_a_request_gets_the_same_numbers_without_strings(processor):
    plain = processor(logprobs=0)
    bare = processor(logprobs=0, extra_args=BARE["vllm_xargs"])
    assert isinstance(bare.logprobs, FlatLogprobs)
    assert isinstance(plain.logprobs, list)
    for one, other in zip(plain.logprobs, bare.logprobs, strict=True):
        assert one.keys() == other.keys()
        for token in one:
            assert one[token].logprob == other[token].logprob
            assert (one[token].decoded_token is None, other[token].decoded_token) == (False, None)
    assert plain.cumulative_logprob == bare.cumulative_logprob == -2.0


def test_requests_without_log_probabilities_and_with_other_arguments_stay_as_they_are(processor):
    assert processor(extra_args=BARE["vllm_xargs"]).logprobs is None
    assert processor(logprobs=0, extra_args={"other": 1}).tokenizer is not None
