"""Exported weights are what `save_pretrained` writes, family by family, and are converted a few at a time."""

import pytest
import torch
from safetensors.torch import load_file

from grpo_spec.lora import LoraConfig
from grpo_workload.policy.adapters.lora import Adapters
from grpo_workload.policy.model.checkpoint_names import CheckpointNames
from grpo_workload.weights.export import Export, full
from support.families import FAMILIES, MASKED, STATEFUL, make_model


@pytest.mark.parametrize("family", [*FAMILIES, *STATEFUL, *MASKED])
def test_exported_weights_are_those_of_a_saved_checkpoint(family, tmp_path):
    model = make_model(family)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    export = Export(full(model), is_partitioned=False, group=CheckpointNames(model).group)
    exported = dict(export)
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    assert [(spec.name, spec.dtype, spec.shape) for spec in export.specs] == [
        (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in exported.items()
    ]
    groups = CheckpointNames(model).group(full(model))
    assert sum(len(group.weights) for group in groups) == len(full(model))
    assert all(len(group.weights) == 1 for group in groups), "no family here joins weights to save them"


def test_the_plan_follows_new_values_and_new_buffers():
    """DeepSpeed casts buffers, and `restore_buffers` puts others in their place."""
    model = make_model("deepseek_v3")
    names = CheckpointNames(model)
    before = dict(Export(full(model), is_partitioned=False, group=names.group))
    before = {name: tensor.clone() for name, tensor in before.items()}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    after = dict(Export(full(model), is_partitioned=False, group=names.group))
    assert all(torch.allclose(after[name], tensor + 1) for name, tensor in before.items())


def test_the_text_part_of_a_checkpoint_keeps_the_names_that_it_has_there(tmp_path):
    make_model("qwen3_5", whole=True).save_pretrained(tmp_path)
    text = type(make_model("qwen3_5")).from_pretrained(tmp_path)
    exported = dict(Export(full(text), is_partitioned=False, group=CheckpointNames(text).group))
    saved = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == {name for name in saved if not name.startswith("model.visual.")} < saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in exported.items())
    adapters = Adapters(text, LoraConfig(push="adapters"), seed=0)
    pushed = Export(adapters.pushed(), is_partitioned=False, group=CheckpointNames(text).group)
    names = {spec.name.partition(".lora_")[0] + ".weight" for spec in pushed.specs}
    assert names == {name for name in exported if name.endswith("_proj.weight") or ".in_proj_" in name}
