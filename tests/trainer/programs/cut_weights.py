"""Imported, it has ZeRO-3 cut all weights but norms': DeepSpeed keeps those under 100,000 elements whole, which all are of a tiny model."""

from grpo_workload import engine

WHOLE_ELEMENTS = 100

_config = engine.deepspeed_config


def _cutting(config):
    made = _config(config)
    made["zero_optimization"]["stage3_param_persistence_threshold"] = WHOLE_ELEMENTS
    return made


engine.deepspeed_config = _cutting
