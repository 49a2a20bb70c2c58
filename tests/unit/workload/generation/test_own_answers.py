"""What vLLM answers is what is trained: log-probabilities are those tokens', and so are tokens of a prompt with images.

vLLM in a rank makes text while it samples only if text may end completions. Images reach servers without loss.
"""

from base64 import b64decode
from io import BytesIO
from types import SimpleNamespace

import pytest
from PIL import Image

from grpo_spec.errors import ConfigError
from grpo_workload.algorithm.samples import PromptImages
from grpo_workload.generation.own_answers import Completions, bare
from grpo_workload.generation.vllm_api import check_read, encode_images


def answer_with(token_ids, logprobs_of):
    answer = SimpleNamespace(
        token_ids=token_ids,
        logprobs=SimpleNamespace(token_ids=logprobs_of, logprobs=[-0.5] * len(logprobs_of)),
        text="stopped here",
        finish_reason="stop",
        routed_experts=None,
    )
    return SimpleNamespace(prompt_token_ids=[1], outputs=[answer])


def test_text_is_asked_for_only_where_it_may_end_completions():
    assert not bare({"temperature": 1.0})["detokenize"]
    assert bare({"temperature": 1.0, "stop": ["</answer>"]})["detokenize"]


def test_a_listener_and_the_caller_get_the_same_completion():
    completions, output = Completions(tokenizer=None, weight_version=3), answer_with([5, 7], [5, 7])
    ((first,), (second,)) = completions.of(output), completions.of(output)
    assert first is second
    assert (first.token_ids, first.logprobs, first.text) == ((5, 7), (-0.5, -0.5), "stopped here")
    assert first.weight_version == 3


def test_log_probabilities_of_other_tokens_are_no_sample():
    with pytest.raises(AssertionError, match="other log-probabilities"):
        Completions(tokenizer=None, weight_version=0).of(answer_with([5, 7], [5, 7, 9]))


@pytest.mark.parametrize(("read", "place"), [((1, 5, 5, 2), 3), ((1, 5, 5, 5, 5, 2), 4), ((1, 5, 5, 5), 4)])
def test_other_tokens_are_refused_by_their_first_difference(read, place):
    check_read((1, 5, 5, 5, 2), [1, 5, 5, 5, 2])
    with pytest.raises(ConfigError, match=f"as {len(read)} tokens, .* makes 5; they differ from token {place} on"):
        check_read((1, 5, 5, 5, 2), list(read))


def test_images_are_encoded_without_loss():
    image = Image.linear_gradient("L").convert("RGB")
    (encoded,) = encode_images(PromptImages(images=(image,), engine_ids=(), token_id=5, inputs={}))
    assert Image.open(BytesIO(b64decode(encoded))).tobytes() == image.tobytes()
