"""Loads models of which rank 0 has the weights, and other ranks files of the same shapes with zeros: loading.py FOLDER

FOLDER has a folder for each model, in it `read` and `zeros`. Reports for each model and setting what is not as
transformers loads it from `read`; in 4 bits also whether their weights lacked values until then.
"""

import gc
import sys
from contextlib import nullcontext
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from results import report
from transformers import core_model_loading
from transformers.integrations import HfDeepSpeedConfig

from grpo_spec.contract import Device
from grpo_spec.lora import LoraConfig
from grpo_workload.policy.adapters import four_bit
from grpo_workload.policy.model import load
from grpo_workload.policy.model.load import load_model
from grpo_workload.ranks.collectives import join
from support.trainer.step_settings import bare_settings

CPU = torch.device("cpu")
ZERO_3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
LORA = LoraConfig.model_validate({"loadIn4Bit": True})


def configured(path):
    return bare_settings(
        str(path),
        "bfloat16",
    )


def values(model, *, is_partitioned=False):
    """Return what checkpoints have: weights, also the names of tied ones, and buffers."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    whole = deepspeed.zero.GatheredParameters(list(model.parameters())) if is_partitioned else nullcontext()
    with whole:
        kept = {name: weight.detach().clone() for name, weight in weights.items()}
    return kept | {name: value for name, value in model.state_dict().items() if name not in weights}


def differences(found, expected):
    differing = {
        name
        for name in found.keys() & expected.keys()
        if found[name].dtype != expected[name].dtype or not torch.equal(found[name], expected[name])
    }
    return sorted(differing | found.keys() ^ expected.keys())


def load_all(folder):
    """Load a model in whole, in parts and in 4 bits."""
    config = configured(folder / ("read" if dist.get_rank() == 0 else "zeros"))
    plain_model = transformers_model(folder / "read")
    expected = values(plain_model)
    threads = []

    def spawn(pool, *arguments, **named):
        threads.append(pool is not None)
        return plain_spawn(pool, *arguments, **named)

    plain_spawn, core_model_loading.spawn_materialize = core_model_loading.spawn_materialize, spawn
    result = {"whole": differences(values(load_model(config, CPU)), expected)}
    core_model_loading.spawn_materialize = plain_spawn
    result["is_ahead"] = any(threads)
    zero_3 = HfDeepSpeedConfig(ZERO_3)
    model = load_model(config, CPU)
    parts = values(model, is_partitioned=True)  # DeepSpeed made them, and keeps none in float32
    result["parts"] = differences(parts, {name: value.to(parts[name].dtype) for name, value in expected.items()})
    result["partitioned"] = all(hasattr(parameter, "ds_id") for parameter in model.parameters())
    del zero_3, model
    gc.collect()
    if folder.name == "llama":
        model = load_model(config, CPU, later=lambda empty: four_bit.weights(empty, LORA))
        names = four_bit.weights(model, LORA)
        result["lacking"] = sorted({model.get_parameter(name).is_meta for name in names})
        for one in (model, plain_model):
            four_bit.quantize(one, LORA, CPU)
        result["4 bits"] = differences(values(model), values(plain_model))
    return result


def transformers_model(path):
    config = configured(path)
    kind = load._kind(config)
    return kind.from_pretrained(path, dtype=torch.bfloat16, attn_implementation=config.model.attention)


def main(folder):
    join(Device.CPU, 60)
    report({path.name: load_all(path) for path in sorted(Path(folder).iterdir())})


main(*sys.argv[1:])
