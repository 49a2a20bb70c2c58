"""The model that engines hold, a rank's generator, and engines without vLLM."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.paths import PROGRAMS
from support.trainer.engines import own_generator, weights_of


@pytest.fixture(scope="module")
def model(tiny_model):
    """The tiny model; what a module's tests change in it, its later tests find."""
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def generator(engines, model, tmp_path_factory):
    """The generator of the only rank, which pushes the model to the module's engines."""
    with own_generator(engines.contract, lambda: weights_of(model), tmp_path_factory.mktemp("group")) as ready:
        yield ready


@pytest.fixture
def start_program():
    """Function start_program(name, *arguments): runs a file of programs/, which is killed when the test ends."""
    started = []

    def start(name, *arguments):
        started.append(subprocess.Popen([sys.executable, str(PROGRAMS / name), *map(str, arguments)]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
