"""Fields that several options decide together: ranks, batch, steps, topology, precision, loss. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import get_args

from grpo_cli.convert.draft import Draft
from grpo_cli.convert.evaluation import settle_evaluation
from grpo_cli.convert.loss import settle_loss
from grpo_cli.convert.openrlhf import settle_openrlhf
from grpo_cli.convert.rows import Kind
from grpo_cli.convert.sources import dataset, model, rewards
from grpo_cli.convert.steps import settle_batch, settle_steps
from grpo_spec.tracking import Tracker


@dataclass(frozen=True, slots=True)
class Given:
    """Answers from the command line that the files do not have; None: not given."""

    nodes: int | None = None
    gpus: int | None = None  # of a node
    rows: int | None = None  # of the dataset


def settle(draft: Draft, given: Given) -> None:
    """Turn the facts of `draft` into fields."""
    settle_openrlhf(draft)
    model(draft)
    dataset(draft)
    rewards(draft)
    _precision(draft)
    _lora(draft)
    ranks = _world(draft, given)
    _topology(draft)
    per_push = settle_batch(draft, ranks)
    settle_steps(draft, given.rows, per_push)
    settle_loss(draft)
    if (prompt := draft.facts.get("prompt")) and "generation.maxModelLen" not in draft.fields:
        completion = draft.value("training.maxCompletionLength")
        why = f"prompts of {prompt} tokens and completions of {completion}"
        draft.set("generation.maxModelLen", prompt + completion, why)
    _tool_turns(draft)
    settle_evaluation(draft, given.rows, per_push)
    _trackers(draft)


def _precision(draft: Draft) -> None:
    """Set the device, the type of the weights, and the ZeRO stage and offloading."""
    facts = draft.facts
    if facts.get("use_cpu"):
        draft.set("device.type", "cpu")
    mixed = facts.get("mixed_precision")
    dtype = facts.get("dtype") or ("float32" if facts.get("bf16") is False or mixed == "no" else None)
    if facts.get("fp16") or mixed == "fp16":
        dtype = "float16"
    elif facts.get("bf16") or mixed == "bf16":
        dtype = "bfloat16"
    if dtype:
        draft.set("model.dtype", dtype)
    zero = facts.get("deepspeed") or facts.get("fsdp") or {}
    by_kind = {"MULTI_GPU": 0, "NO": 0, "FSDP": 3}.get(str(facts.get("distributed_type")))
    by_tool = 3 if "verl_mini_batch" in facts else 0 if "swift_dataset" in facts else None
    offload = facts.get("offload") or zero.get("offload")
    stages = [one for one in (facts.get("zero_stage"), zero.get("stage"), by_kind, by_tool) if one is not None]
    stage = stages[0] if stages else None
    if offload or dtype == "float16":
        stage = stage or 2
    if stage is not None:
        draft.set("parallelism.zeroStage", stage)
    if offload:
        draft.set("parallelism.offloadOptimizer", "cpu")


def _lora(draft: Draft) -> None:
    facts = draft.facts
    if rank := facts.get("lora_rank"):
        draft.set("lora.r", rank)
    if rank or facts.get("use_lora") or "lora.path" in draft.fields:
        draft.fields.setdefault("lora.targetModules", ["all-linear"])
        if facts.get("lora_excludes_vision"):
            draft.set("model.freezeVisionTower", True, "with lora, the tower gets no adapters")
        if draft.fields.get("lora.loadIn4Bit") and draft.fields.get("parallelism.zeroStage") == 3:
            draft.set("parallelism.zeroStage", 2, "weights in 4 bits are not partitioned")
    else:
        draft.drop("lora")
        draft.findings = [
            replace(one, kind=Kind.NOT_NEEDED, to="", note="LoRA is off") if one.to.startswith("lora.") else one
            for one in draft.findings
            if not (one.to.startswith("lora.") and one.note.startswith("not set"))
        ]
    if "swift_dataset" in facts and "training.learningRate" not in draft.fields:
        draft.set("training.learningRate", 1e-4 if facts.get("use_lora") else 1e-5, "ms-swift's default")


def _world(draft: Draft, given: Given) -> int:
    """Set the trainer's group; return its number of ranks."""
    facts = draft.facts
    nodes, sequence = given.nodes or facts.get("nodes") or 1, draft.value("parallelism.sequence")
    ranks = facts.get("per_node")
    if ranks is None and (processes := facts.get("processes")):
        ranks = math.ceil(processes / nodes)
        if processes % nodes:
            note = f"{nodes} nodes cannot share {processes} processes equally: each has {ranks} here; "
            draft.left("num_processes", processes, f"{note}write a group for each number of GPUs", "trainer.groups")
    of_engine = 1 if "vllm_device" in facts else 0
    if given.gpus:
        ranks = given.gpus - of_engine
    if ranks is None:
        ranks = math.lcm(draft.value("generation.tensorParallel"), sequence)
        note = f"the job asks for pods with {ranks} GPU{'s' * (ranks > 1)}: pass --nodes N --gpus M"
        draft.left("GPUs", "not said", note, "trainer.groups")
    draft.set("trainer.groups", [{"name": "trainer", "replicas": nodes, "gpus": ranks + of_engine}])
    if nodes * ranks % sequence:
        fits = math.gcd(nodes * ranks, sequence)
        note = f"{nodes * ranks} ranks cannot share: {fits} is written"
        draft.left("sequence", sequence, note, "parallelism.sequence")
        draft.set("parallelism.sequence", fits)
    return int(nodes * ranks)


def _topology(draft: Draft) -> None:
    facts = draft.facts
    mode = str(facts.get("vllm_mode", "colocate")).lower()
    if mode not in ("colocate", "server"):
        draft.left("vllm_mode", mode, "Colocate is written: use colocate or server", "generation.topology")
    if "vllm_device" in facts:
        draft.set("generation.topology", "NodeLocal", "vLLM has the last GPU of every node for itself")
        draft.set("generation.nodeLocal.gpusPerNode", 1)
    elif mode == "server" and facts.get("use_vllm", True):
        draft.set("generation.topology", "Server")
        gpus = draft.value("generation.tensorParallel") * facts.get("server_copies", 1)
        why = "one copy of the model; more GPUs hold more copies, more replicas are more servers"
        group = {"name": "vllm", "replicas": 1, "gpus": gpus}
        draft.set("generation.server.groups", [group], "" if "server_copies" in facts else why)
    else:
        draft.set("generation.topology", "Colocate")
        if "sleep" in facts:
            draft.set("generation.colocate.sleepLevel", 2 if facts["sleep"] else 0)
        if facts.get("offload_generating"):
            draft.fields.setdefault("parallelism.offloadOptimizer", "generating")
        return
    draft.drop("generation.colocate")
    if facts.get("offload_generating"):
        note = "engines have their own GPUs, so that optimizer states can stay on the trainer's; cpu offloads them"
        draft.find(Kind.NOT_NEEDED, "offload_optimizer", True, note, "parallelism.offloadOptimizer")


def _tool_turns(draft: Draft) -> None:
    field = "training.maxToolCallingIterations"
    if "tool_turns" in draft.facts and draft.fields.keys() & {"tools", "environments"}:
        draft.set(field, draft.facts["tool_turns"])
    elif "tool_turns" in draft.facts:
        note = f"no file names tools: name them in tools or environments, and set {field}"
        draft.left("max_tool_calling_iterations", draft.facts["tool_turns"], note, field)


def _trackers(draft: Draft) -> None:
    """Keep the trackers that jobs have; `none` and `console` are no tracker."""
    wanted = [name for name in draft.facts.get("trackers", ()) if name not in ("none", "console")]
    if known := [name for name in wanted if name in get_args(Tracker)]:
        draft.set("training.reportTo", known)
    for name in sorted(set(wanted) - set(known)):
        note = f"jobs do not report to {name}: metrics.jsonl has all metrics (docs/metrics.md)"
        draft.find(Kind.DIFFERENT, "report_to", name, note, "training.reportTo")
