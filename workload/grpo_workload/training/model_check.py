"""Says what works with a job's model, and refuses what does not, from its configuration alone.

No weights are read, and no engine starts: modules and shapes are those of a model on the meta device. Every rank
refuses a job by `refuse_unfit` before it loads anything that takes minutes; `model_findings` is for people. What only
numbers can show, `policy/trials` and the first push compare later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from grpo_spec.errors import ConfigError
from grpo_spec.words import counted
from grpo_workload.capacity.proposals import CannotFitError, check_fit
from grpo_workload.capacity.shapes import Models
from grpo_workload.capacity.states import GIB, training_footprint
from grpo_workload.capacity.tensor_parallel import ratio
from grpo_workload.pod.model_split import check_split, split_sizes
from grpo_workload.policy.model import attention, rope, vision
from grpo_workload.policy.model.checkpoint_names import CheckpointNames
from grpo_workload.policy.model.families import ALL, TESTED
from grpo_workload.policy.model.load import holds_adapters, read_config
from grpo_workload.policy.model.router_replay import find_routers
from grpo_workload.policy.model.sequence_check import check_sequence
from grpo_workload.ranks.sequence_group import check_size
from grpo_workload.training.call_check import describe_calls
from grpo_workload.training.subject import Subject
from grpo_workload.weights.export import full

logger = logging.getLogger(__name__)

SMALL_MODEL = 3e9
"""Below this many parameters, tensor parallelism costs more than it gains (TRL: a loss at 1.5B, a gain at 7B)."""
MAX_GPUS = 64  # of one engine: the largest generation.tensorParallel


class Inconclusive(str):
    """A finding that is neither a pass nor a refusal."""


def _files(subject: Subject) -> str:
    """Refuse what is not a model that transformers knows."""
    model = subject.config.model
    if model.path is not None and not Path(model.path).is_dir():
        raise ConfigError(
            f"{model.field}: there is no folder {model.path} in the container; is its volume mounted in every trainer "
            "pod?"
        )
    if holds_adapters(subject.config):
        raise ConfigError(
            f"{model.field}: {model.source} holds adapters, which engines cannot load as a model; "
            "give a folder with a whole model, made by "
            "AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(...)"
        )
    return f"a whole model of the type {read_config(subject.config).model_type}"


def _dtype(subject: Subject) -> str:
    """Refuse weights that engines would keep quantized."""
    model = subject.config.model
    quantization = subject.fields.get("quantization_config")
    if quantization and not subject.config.pushes_adapters:  # transformers may load it in bfloat16, engines would not
        raise ConfigError(
            f"{model.field}: {model.source} holds weights that are quantized "
            f"({quantization.get('quant_method', 'unknown method')}), which cannot be trained; "
            "use a copy with weights in bfloat16"
        )
    return model.dtype


def _family(subject: Subject) -> str:
    """Say how the family was compared."""
    family = str(subject.fields.get("model_type"))
    if family not in TESTED:
        return Inconclusive(
            f"{family} is not among the families that were compared; each job compares it when it starts"
        )
    if ALL not in TESTED[family]:
        return Inconclusive(f"{family} was compared in training only; no push to vLLM was")
    return f"{family} was compared in training, and in pushes to vLLM ({', '.join(TESTED[family])})"


def _attention(subject: Subject) -> str:
    """Refuse layers that `model.attention` does not compute, or that would mix packed sequences."""
    kind, config = subject.config.model.attention, subject.model.config
    packs = subject.config.training.per_device_train_batch_size != 1
    attention.check_layers(config, kind, packs=packs)
    attention.check_softcap(config, kind)
    how = "sequences packed" if packs else "one sequence for each micro-batch (training.perDeviceTrainBatchSize: 1)"
    return f"model.attention {kind}, {how}"


def _sequence(subject: Subject) -> str | None:
    """Refuse ranks that cannot share sequences."""
    size, world_size = subject.config.parallelism.sequence, subject.contract.world_size
    if size == 1:
        return None
    check_size(size, world_size)
    check_sequence(subject.model.config, subject.config.model.attention, size)
    return f"{size} neighbouring ranks share each sequence, in {counted(world_size // size, 'group')}"


def _rope(subject: Subject) -> str | None:
    """Refuse lengths at which rotary embeddings are not known to be vLLM's."""
    rope.check_rope(subject.model.config, subject.config)
    return rope.describe(subject.model.config, subject.config.generation.max_model_len)


def _inputs(subject: Subject) -> str:
    """Refuse to freeze a vision tower that the model does not have."""
    if subject.config.model.freeze_vision_tower:
        vision.freeze(subject.model)
        return "text and images, the vision tower frozen"
    return "text and images" if vision.has_vision(subject.model.config) else "text alone"


def _router_replay(subject: Subject) -> str | None:
    """Refuse to replay the routers of a model that has none, or others than those of `router_replay`."""
    if not subject.config.training.router_replay:
        return None
    return f"the experts of {len(find_routers(subject.model))} layers are those that vLLM chooses"


def _lora(subject: Subject) -> str | None:
    """Refuse target modules that do not exist or cannot have adapters, and adapters that cannot be pushed."""
    if subject.adapters is None:
        return None
    share = subject.num_quantized / subject.num_parameters
    rounded = f"; {share:.0%} of the model's own in 4 bits" if subject.num_quantized else ""
    return (
        f"{(subject.num_adapted or 0) / 1e6:.1f} million parameters in {', '.join(subject.adapters.adapted())}{rounded}"
    )


def _push(subject: Subject) -> str | None:
    """Refuse weights that transformers cannot convert back to those of checkpoints, which engines load."""
    if not subject.has_vllm:
        return None
    weights = subject.adapters.pushed() if subject.adapters else full(subject.model)
    number = sum(len(group.specs) for group in CheckpointNames(subject.model).group(weights))
    of_adapters = " of adapters" if subject.config.pushes_adapters else ""
    return f"{number} weights{of_adapters} under the checkpoint's names"


def _split(subject: Subject) -> str | None:
    """Refuse numbers of GPUs over which an engine cannot split the model."""
    if not subject.has_vllm:
        return None
    for field, size in subject.engines.items():
        check_split(field, size, subject.fields)
    used, sizes = max(subject.engines.values()), ", ".join(map(str, split_sizes(subject.fields, MAX_GPUS)))
    is_slow = used > 1 and subject.num_parameters < SMALL_MODEL
    slow = f"; below {SMALL_MODEL / 1e9:.0f} billion parameters one GPU for each copy is faster" if is_slow else ""
    return f"generation.tensorParallel {used}{slow}; engines can split the model over {sizes} GPUs"


def _calls(subject: Subject) -> str | None:
    """Refuse a chat template that cannot write calls of tools and their results, or calls that no parser reads."""
    if not subject.config.has_episodes:
        return None
    return describe_calls(subject.config) or Inconclusive("vLLM, whose parsers read calls, is not installed here")


def memory(subject: Subject) -> str:
    """Refuse a job that cannot fit into its GPUs, in any topology; without a GPU, only say what training holds."""
    config, world_size = subject.config, subject.contract.world_size
    own = subject.num_parameters
    need = training_footprint(
        config,
        num_parameters=own,
        world_size=world_size,
        num_adapted=subject.num_adapted,
        num_quantized=subject.num_quantized,
    )
    parts = {
        "weights": need.weights + need.reference,
        "optimizer states": need.masters + need.moments,
        "gradients": need.kept + need.gradients,
    }
    listed = ", ".join(f"{number / GIB:.1f} GiB of {name}" for name, number in parts.items())
    text = (
        f"{own / 1e9:.2f} billion parameters in {config.model.dtype}: under ZeRO-{config.parallelism.zero_stage} each "
        f"of {world_size} GPUs holds {listed}"
    )
    if subject.gpu_bytes is None:
        return f"{text}; activations come on top"
    models = Models()
    try:
        made = check_fit(subject.contract, subject.gpu_bytes, models)
    except CannotFitError:
        raise
    except Exception as error:  # a forecast that fails ends no job
        logger.warning("whether the job fits is not known: %s: %s", type(error).__name__, error)
        return f"{text}; activations come on top"
    place = max(made.gpus, key=lambda one: one.peak)
    text += (
        f"; {place.name} is planned to need {place.peak / GIB:.1f} of {subject.gpu_bytes / GIB:.1f} GiB (in the phase "
        f"{place.worst}), and micro-batches of up to about {made.chosen_tokens} tokens to fit"
    )
    if not made.is_safe:
        text += "; that is tight: fragments may take what is left"
    if made.unknown:
        text += f"; activations are not counted, as the model does not run on the meta device ({made.unknown})"
    split = ratio(subject.contract, models)
    return text if split is None else f"{text}; {split}"


Aspects = dict[str, Callable[[Subject], str | None]]

AT_START: Aspects = {
    "files": _files,
    "dtype": _dtype,
    "family": _family,
    "attention": _attention,
    "sequences": _sequence,
    "rope": _rope,
    "inputs": _inputs,
    "router replay": _router_replay,  # before adapters, which wrap routers
    "lora": _lora,
    "push": _push,
    "tensor parallel": _split,
    "calls": _calls,
    "memory": memory,
}
"""The questions about aspects; a function returns None for one that the job does not have."""


def refuse_unfit(subject: Subject, *, logs: bool) -> None:
    """Find out about the model; raises ConfigError for the first aspect that does not work. `logs`: log the others."""
    for aspect, look in AT_START.items():
        if (text := look(subject)) and logs:
            logger.info("the model's %s: %s", aspect, text)
