"""An engine that quantizes to FP8 samples from pushed weights, nearly as the trainer; prints the differences."""

import pytest

from support.trainer.engines import change, prompts, weights_of
from support.trainer.gpu_jobs import colocated_engine
from support.trainer.random_llama import make_random_llama, mean_difference

pytestmark = pytest.mark.vllm

PROMPT_LIST = prompts()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Llama of 0.4 billion parameters in bfloat16; its name is its folder."""
    return make_random_llama(tmp_path_factory.mktemp("llama"), "cuda:0", hidden=1024, layers=24, heads=16)


@pytest.fixture(scope="module")
def generator(model):
    ready = colocated_engine(model, quantization="fp8")
    yield ready
    ready.close()


def test_an_engine_in_fp8_follows_pushes(model, generator):
    for version in range(1, 4):
        change(model)
        stale = mean_difference(model, generator, PROMPT_LIST, 8)
        generator.sleep()
        generator.sync_weights(weights_of(model), version)
        fresh = mean_difference(model, generator, PROMPT_LIST, 8)
        print(f"push {version}: log-probabilities differ by {stale:.4f} before, {fresh:.4f} after")
        assert fresh < stale / 2.5  # of a random model, which no training has made robust to rounding
