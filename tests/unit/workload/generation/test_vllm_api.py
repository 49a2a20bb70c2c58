"""Tokens that vLLM read of a prompt with images are those trained on; images reach servers without loss."""

from base64 import b64decode
from io import BytesIO

import pytest
from PIL import Image

from grpo_spec.errors import ConfigError
from grpo_workload.algorithm.samples import PromptImages
from grpo_workload.generation.vllm_api import check_read, encode_images


@pytest.mark.parametrize(("read", "place"), [((1, 5, 5, 2), 3), ((1, 5, 5, 5, 5, 2), 4), ((1, 5, 5, 5), 4)])
def test_other_tokens_are_refused_by_their_first_difference(read, place):
    check_read((1, 5, 5, 5, 2), [1, 5, 5, 5, 2])
    with pytest.raises(ConfigError, match=f"as {len(read)} tokens, .* makes 5; they differ from token {place} on"):
        check_read((1, 5, 5, 5, 2), list(read))


def test_images_are_encoded_without_loss():
    image = Image.linear_gradient("L").convert("RGB")
    (encoded,) = encode_images(PromptImages(images=(image,), engine_ids=(), token_id=5, inputs={}))
    assert Image.open(BytesIO(b64decode(encoded))).tobytes() == image.tobytes()
