"""What several options say together: ranks, batch, steps, topology, precision, rewards. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from grpo_cli.convert.draft import Draft
from grpo_cli.convert.rows import Kind
from grpo_cli.convert.sources import dataset, model, rewards
from grpo_workload.config import TrainingConfig

MAX_STEPS = TrainingConfig.model_fields["max_steps"].default


@dataclass(frozen=True, slots=True)
class Given:
    """What the user tells beside the files; None is not told."""

    nodes: int | None = None
    gpus: int | None = None  # of a node
    rows: int | None = None  # of the dataset


def settle(draft: Draft, given: Given) -> None:
    """Turn the facts of `draft` into fields."""
    model(draft)
    dataset(draft)
    rewards(draft)
    _precision(draft)
    _lora(draft)
    ranks = _world(draft, given)
    _topology(draft)
    _batch(draft, ranks)
    _steps(draft, given)
    _loss(draft)
    _length(draft)


def _precision(draft: Draft) -> None:
    facts = draft.facts
    if facts.get("use_cpu"):
        draft.set("device.type", "cpu")
    mixed = facts.get("mixed_precision")
    kind: str | None
    if facts.get("fp16") or mixed == "fp16":
        kind = "float16"
    elif facts.get("bf16") or mixed == "bf16":
        kind = "bfloat16"
    else:
        kind = facts.get("dtype") or ("float32" if facts.get("bf16") is False or mixed == "no" else None)
    if kind:
        draft.set("model.dtype", kind)
    stage, offload = _sharding(draft)
    if offload or kind == "float16":
        stage = stage or 2
    if stage is not None:
        draft.set("parallelism.zeroStage", stage)
    if offload:
        draft.set("parallelism.offloadOptimizer", "cpu")


def _sharding(draft: Draft) -> tuple[int | None, bool]:
    facts = draft.facts
    told = facts.get("deepspeed") or facts.get("fsdp") or {}
    by_kind = {"MULTI_GPU": 0, "NO": 0, "FSDP": 3}.get(str(facts.get("distributed_type")))
    by_tool = 3 if "verl_mini_batch" in facts else 0 if "swift_dataset" in facts else None
    stages = (facts.get("zero_stage"), told.get("stage"), by_kind, by_tool)
    stage = next((stage for stage in stages if stage is not None), None)
    return stage, bool(facts.get("offload") or told.get("offload"))


def _lora(draft: Draft) -> None:
    facts = draft.facts
    if rank := facts.get("lora_rank"):
        draft.set("lora.r", rank)
    if not (rank or facts.get("use_lora")):
        draft.drop("lora")
        draft.findings = [
            replace(finding, kind=Kind.NOT_NEEDED, to="", note="LoRA is off") if finding.to.startswith("lora.") else finding
            for finding in draft.findings
            if not (finding.to.startswith("lora.") and finding.note.startswith("not set"))
        ]
    else:
        draft.fields.setdefault("lora.targetModules", ["all-linear"])
    if "swift_dataset" in facts and "training.learningRate" not in draft.fields:
        draft.set("training.learningRate", 1e-4 if facts.get("use_lora") else 1e-5, "ms-swift's default")


def _world(draft: Draft, given: Given) -> int:
    """The trainer's group; returns its ranks."""
    facts = draft.facts
    nodes = given.nodes or facts.get("nodes") or 1
    ranks = facts.get("per_node")
    if ranks is None and (processes := facts.get("processes")) and processes > 0:
        ranks = math.ceil(processes / nodes)
        if processes % nodes:
            note = f"{processes} processes are no equal share of {nodes} nodes: {ranks} on each here; give groups of their own GPUs"
            draft.tell(Kind.LEFT, "num_processes", processes, note, "trainer.groups")
    beside = 1 if "vllm_device" in facts else 0
    if given.gpus:
        ranks = given.gpus - beside
    if ranks is None:
        ranks = draft.fields.get("generation.tensorParallel", 1)
        draft.tell(Kind.LEFT, "GPUs", "not said", f"pods of {ranks} are written: give --nodes and --gpus", "trainer.groups")
    draft.set("trainer.groups", [{"name": "trainer", "replicas": nodes, "gpus": ranks + beside}])
    return int(nodes * ranks)


def _topology(draft: Draft) -> None:
    facts = draft.facts
    mode = str(facts.get("vllm_mode", "colocate")).lower()
    if mode not in ("colocate", "server"):
        draft.tell(Kind.LEFT, "vllm_mode", mode, "colocate or server would do: Colocate is written", "generation.topology")
    if "vllm_device" in facts:
        draft.set("generation.topology", "NodeLocal", "vLLM has the last GPU of every node for itself")
        draft.set("generation.nodeLocal.gpusPerNode", 1)
    elif mode == "server" and facts.get("use_vllm", True):
        gpus = draft.fields.get("generation.tensorParallel", 1) * facts.get("server_copies", 1)
        draft.set("generation.topology", "Server")
        why = "" if "server_copies" in facts else "one copy of the model; more GPUs hold more, and more replicas are more servers"
        draft.set("generation.server.groups", [{"name": "vllm", "replicas": 1, "gpus": gpus}], why)
    else:
        draft.set("generation.topology", "Colocate")
        if "sleep" in facts:
            draft.set("generation.colocate.sleepLevel", 2 if facts["sleep"] else 0)
        if facts.get("offload_generating"):
            draft.fields.setdefault("parallelism.offloadOptimizer", "generating")
        return
    draft.drop("generation.colocate")
    if facts.get("offload_generating"):
        note = "engines have GPUs of their own: states may stay on the trainer's, or live in memory with cpu"
        draft.tell(Kind.LEFT, "offload_optimizer", True, note, "parallelism.offloadOptimizer")


def _batch(draft: Draft, ranks: int) -> None:
    facts, generations = draft.facts, draft.fields.get("training.numGenerations", TrainingConfig.model_fields["num_generations"].default)
    if "verl_batch" in facts:
        prompts = facts.get("verl_mini_batch", facts["verl_batch"])
        why = "ppo_mini_batch_size"
    elif "per_device" in facts:
        per_device, accumulation = facts["per_device"], int(facts.get("accumulation") or 1)
        prompts = math.ceil(per_device * ranks * accumulation / generations)
        why = f"{per_device} a device x {ranks} ranks x {accumulation} accumulated / {generations} generations"
        draft.set("training.perDeviceTrainBatchSize", per_device)
        if per_device * ranks * accumulation % generations:
            note = f"{per_device * ranks * accumulation} completions are no whole number of groups of {generations}: {prompts} prompts"
            draft.tell(Kind.LEFT, "batch", why, note, "training.promptsPerStep")
    else:
        prompts, why = TrainingConfig.model_fields["prompts_per_step"].default, "the default"
        if prompts >= ranks:
            return
    if prompts < ranks:
        note = f"{prompts} prompts for {ranks} ranks: each needs one, so that a step has {ranks}; fewer ranks would keep the batch"
        draft.tell(Kind.LEFT, "batch", why, note, "training.promptsPerStep")
        prompts, why = ranks, f"one for each rank, more than {why}"
    draft.set("training.promptsPerStep", prompts, why)


def _steps(draft: Draft, given: Given) -> None:
    facts, rows = draft.facts, given.rows or draft.facts.get("rows")
    prompts = draft.fields.get("training.promptsPerStep")
    steps, why = None, ""
    if facts.get("max_steps", -1) > 0:
        steps = facts["max_steps"]
    elif "verl_steps" in facts:
        steps = facts["verl_steps"] * max(1, facts["verl_batch"] // facts["verl_mini_batch"])
        why = f"{facts['verl_steps']} x train_batch_size / ppo_mini_batch_size"
    elif "epochs" in facts and rows and prompts:
        steps = max(1, math.floor(facts["epochs"] * rows / prompts))
        why = f"{facts['epochs']:g} epochs of {rows} rows / {prompts} prompts"
    elif "epochs" in facts:
        note = f"how many rows the dataset has is not said: {MAX_STEPS} steps are written; give --rows, or set maxSteps"
        draft.tell(Kind.LEFT, "epochs", f"{facts['epochs']:g}", note, "training.maxSteps")
    steps_now = steps or MAX_STEPS
    draft.set("training.maxSteps", steps_now, why or ("" if steps else "not known: epochs x rows / promptsPerStep"))
    warmup = facts.get("warmup", 0)
    warmup = warmup if warmup >= 1 else (warmup if warmup > 0 else facts.get("warmup_ratio", 0)) * steps_now
    if warmup:
        draft.set("training.warmupSteps", round(warmup))
    if (every := facts.get("save_steps")) is not None:
        every = round(every * steps_now) if 0 < every < 1 else int(every)
        draft.set("storage.checkpointEverySteps", every if every > 0 else steps_now)


def _loss(draft: Draft) -> None:
    facts = draft.facts
    if "use_kl_loss" in facts:
        draft.set("training.beta", facts.get("kl_coef", 0.001) if facts["use_kl_loss"] else 0.0)
    if "clip_ratio" in facts:
        draft.fields.setdefault("training.epsilon", facts["clip_ratio"])
    if "clipping" in facts:
        draft.fields.setdefault("training.maxGradNorm", facts["clipping"])
    if "norm_by_std" in facts:
        draft.set("training.scaleRewards", "group" if facts["norm_by_std"] else "none")
    if facts.get("correct_importance") is False or "verl_batch" in facts:
        draft.set("training.importanceSamplingCorrection", "none")


def _length(draft: Draft) -> None:
    if (prompt := draft.facts.get("prompt")) and "generation.maxModelLen" not in draft.fields:
        completion = draft.fields.get("training.maxCompletionLength", TrainingConfig.model_fields["max_completion_length"].default)
        draft.set("generation.maxModelLen", prompt + completion, f"prompts of {prompt} tokens and completions of {completion}")
