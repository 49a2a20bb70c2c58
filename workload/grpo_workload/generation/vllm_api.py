"""The trainer's requests to vLLM, and its calls of vLLM's own functions: sampling, and the transfer of weights.

Read in the sources of 0.32.0 and 0.33.0 (`vllm/distributed/weight_transfer/`, `vllm/entrypoints/rl/online/`). Weights
are sent in our own format (`weights.wire`). Functions import vLLM when called: ranks that never load vLLM import this
module too.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from grpo_spec.errors import ConfigError
from grpo_spec.trainer import TrainerConfig
from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.samples import PromptImages
from grpo_workload.pod.versions import installed

Backend = Literal["nccl", "gloo"]

BARE_LOGPROBS = "grpo_bare_logprobs"
BARE: dict[str, Any] = {"return_tokens_as_token_ids": True, "vllm_xargs": {BARE_LOGPROBS: 1}}
"""Fields of a request over HTTP whose log-probabilities need no strings of tokens (`vllm_worker.bare_logprobs`)."""

IMAGES = "grpo_images"
"""Key in `vllm_xargs` of a request over HTTP: the prompt's images as PNG in base64 (`vllm_worker.prompt_images`)."""


EVALUATION = "evaluation"
"""Salt of the prefix cache for evaluations: training neither finds what they cached, nor samples otherwise for it."""


def engine_class(config: TrainerConfig) -> str | None:
    """Return how vLLM would build the job's model, by its configuration alone; None where vLLM is not installed.

    Raises:
        ConfigError: vLLM's configuration refuses the model, or settings with it.
    """
    try:
        from vllm.config import ModelConfig
    except ImportError:
        return None
    model, name = config.model, f"vLLM {installed('vLLM')}"
    try:
        found = ModelConfig(
            model=model.source,
            revision=model.revision,
            dtype=model.dtype,
            max_model_len=config.generation.max_model_len,
        )
    except ValueError as error:
        cause = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ConfigError(f"{model.field}: {name} refuses this model: {cause}") from error
    if found.using_transformers_backend():
        return f"{name} runs transformers' {found.architecture}"
    return f"{name} has its own {found.architecture}"


def nccl_join(*, host: str, port: int, world_size: int) -> Any:
    """Join a transfer group as its rank 0, on the current CUDA device; block until all workers have joined."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    return trainer_init({"master_address": host, "master_port": port, "world_size": world_size})


def nccl_leave(communicator: Any) -> None:
    """Abort the group and free its port."""
    communicator.destroy()
    communicator.group = None  # its store listens on the port


def nccl_abort(communicator: Any) -> None:
    """Abort the group's collectives from another thread; later calls on it do nothing."""
    communicator.disabled = True  # first: the waiting thread may proceed to its next call at once
    with torch.cuda.device(communicator.device):
        communicator.nccl.ncclCommAbort(communicator.comm)
    communicator.available = False


def sampling_parameters(training: TrainingConfig) -> dict[str, Any]:
    """Return a request's parameters under vLLM's names, but for the seed.

    They include all that a model's generation_config.json could set, and whatever else would make the distribution
    differ from the one of which the trainer computes log-probabilities.
    """
    # The text that rewards read is that of the tokens, so it has the text at which they end.
    stop = {"stop": list(training.stop), "include_stop_str_in_output": True} if training.stop else {}
    return stop | {
        "skip_special_tokens": True,
        "max_tokens": training.max_completion_length,
        "temperature": training.temperature,
        "top_p": training.top_p,
        "top_k": training.top_k,
        "min_p": training.min_p,
        "repetition_penalty": training.repetition_penalty,
        "presence_penalty": training.presence_penalty,
        "frequency_penalty": training.frequency_penalty,
    }


def engine_prompt(token_ids: Sequence[int], images: PromptImages | None = None) -> dict[str, Any]:
    """Return a prompt as `LLM.generate` takes it. vLLM itself puts the tokens of images in place of placeholders."""
    if images is None:
        return {"prompt_token_ids": list(token_ids)}
    return {"prompt_token_ids": list(images.engine_ids), "multi_modal_data": {"image": list(images.images)}}


def encode_images(images: PromptImages) -> list[str]:
    """Return the images as a request over HTTP has them: without loss, in tens of milliseconds for each megapixel."""

    def encode(image: Any) -> str:
        image.save(file := BytesIO(), "png", compress_level=1)
        return b64encode(file.getvalue()).decode()

    return [encode(image) for image in images.images]


def decode_array(text: str | None) -> NDArray[Any] | None:
    """Return an array that an answer over HTTP has, as the bytes of a .npy file in base64."""
    return None if text is None else np.load(BytesIO(b64decode(text)), allow_pickle=False)


def check_read(token_ids: Sequence[int], read: Sequence[int]) -> None:
    """Check that vLLM has sampled for the tokens that are trained on; with images, each side expands placeholders.

    Raises:
        ConfigError: says where they differ first.
    """
    if list(read) == list(token_ids):
        return
    pairs = enumerate(zip(token_ids, read, strict=False))
    place = next((place for place, (own, other) in pairs if own != other), min(len(token_ids), len(read)))
    raise ConfigError(
        f"generation.engineArgs: vLLM reads a prompt with images as {len(read)} tokens, of which the model's processor "
        f"makes {len(token_ids)}; they differ from token {place} on. Remove arguments that change how vLLM processes "
        "images, such as mm_processor_kwargs; if there are none, vLLM and transformers differ for this model, and "
        "another one would work"
    )


def token_prompt(token_ids: list[int]) -> dict[str, Any]:
    """Return a prompt as `LLMEngine.add_request` takes it: as vLLM's renderer would return it."""
    return {"type": "token", "prompt_token_ids": token_ids}


@dataclass
class _Whole:
    """A request as vLLM's detokenizer reads it."""

    prompt_token_ids: list[int]
    sampling_params: Any
    request_id: str = "whole"
    prompt_embeds: None = None


def whole_text(tokenizer: Any, prompt_ids: Sequence[int], token_ids: Sequence[int], *, is_stopped: bool) -> str:
    """Return the text that vLLM would give to a completion.

    Decoding the tokens alone would lose a leading space with some tokenizers, and end with half a character.

    Args:
        tokenizer: the engine's.
        prompt_ids: the prompt's tokens.
        token_ids: the completion's tokens.
        is_stopped: whether the last one ended it; vLLM leaves that one out of the text.
    """
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    whole: Any = _Whole(list(prompt_ids), SamplingParams())
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, whole)
    detokenizer.update(list(token_ids), is_stopped)
    return str(detokenizer.get_next_output_text(finished=True, delta=False))


def adapter_renames(model: Any) -> Any:
    """Return how a vLLM model renames the modules that adapters of the original name; None where it does not."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    return mapper.get_rename_mapper()


def repack_for_cpu(model: Any) -> None:
    """Pack what vLLM multiplies by on CPUs again, after new weights.

    vLLM repacks only output layers that were loaded under their own name, not those tied to the embeddings, and packs
    experts only when they are loaded first. Mamba-2's convolutions keep a view of the weights that are not packed. On
    GPUs there are no packed copies.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        elif "w13_weight" in module._parameters and (kernel := getattr(module.quant_method, "moe_kernel", None)):
            kernel.fused_experts.process_weights_after_loading(module)
        elif "conv_weights" in module._buffers and hasattr(module.conv1d, "_cpu_unpacked_conv_weight"):
            module.conv_weights.copy_(module.conv1d._cpu_unpacked_conv_weight)
