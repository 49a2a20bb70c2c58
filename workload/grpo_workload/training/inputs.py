"""Inputs of a run: the tokenizer, the dataset with its rewards, prompts, and the problems of evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_spec.contract import Contract, Device
from grpo_spec.inputs import ModelConfig
from grpo_workload.algorithm.reuse import batches_from
from grpo_workload.data.dataset import load_prompts
from grpo_workload.data.images import ImagePrompts, load_processor
from grpo_workload.data.origin import DataOrigin, origin_of
from grpo_workload.data.overlong import prompt_limit
from grpo_workload.data.prefetch import PromptLoader
from grpo_workload.data.prompt_source import PromptSource
from grpo_workload.data.scan import Longest, scan
from grpo_workload.data.tokenizer import load_tokenizer
from grpo_workload.data.tool_schemas import ToolSchemas
from grpo_workload.policy.model.vision import has_vision
from grpo_workload.ranks.collectives import on_main
from grpo_workload.reporting.jsonl import read_evaluations
from grpo_workload.rewards.scoring import Reward, begin_check, build_rewards
from grpo_workload.storage.resuming import Source
from grpo_workload.training.checks import check_patience
from grpo_workload.training.evaluation import load_evaluation
from grpo_workload.training.resume import DATASET, EVALUATION, settle_rows
from grpo_workload.training.run import Evaluation

IMAGE_WORKERS = 2
"""Default of `dataset.dataloaderNumWorkers` where prompts have images: to decode one takes tens of milliseconds."""


def load_data(
    contract: Contract, resumed: Source | None, tools: ToolSchemas | None = None
) -> tuple[Any, PromptSource, list[Reward], DataOrigin]:
    """Load the tokenizer and the dataset, and build the rewards, whose processes start here; collective.

    `tools`: what the model may call; None for a job without tools or environments.
    """
    config = contract.config
    tokenizer = load_tokenizer(config.model)
    source = load_prompts(
        config.dataset,
        tokenizer,
        seed=config.training.seed,
        limit=prompt_limit(config, config.dataset),
        images=ImagePrompts.of(config),
        tools=tools,
    )
    data = settle_rows(DATASET, config.dataset.field, origin_of(config.dataset, source), contract, resumed)
    source.first_step = data.first_step
    rewards = build_rewards(config.rewards, source, has_environments=bool(config.environments))
    check_patience(rewards, contract.timeout_seconds)
    return tokenizer, source, rewards, data


def start_prompts(
    contract: Contract, source: PromptSource, rewards: Sequence[Reward], share: range, step: int, state_dir: Path
) -> tuple[PromptLoader, Longest]:
    """Scan this rank's rows, and start preparing its prompts. The policy takes longest to load, so both come before.

    Returns:
        The prompts, and the longest one, as far as it is known.
    """
    config = contract.config
    batches = batches_from(step, config.training)
    longest = Longest(None, is_known=False)
    if source.is_scannable or contract.device is Device.CUDA:  # on a CPU, nothing is measured by the longest
        longest = scan(
            source,
            share=share,
            prompts_per_step=config.training.prompts_per_step,
            steps=batches,
            look=partial(begin_check, rewards),
        )
        # Where rows are drawn in place of others, they are of the whole dataset.
        draws_any = config.training.max_resample_times > 0 or config.dataset.overlong_prompts == "skip"
        reads_all = len(batches) * config.training.prompts_per_step >= len(source)
        longest = longest._replace(is_known=longest.is_known and (reads_all or not draws_any))
    workers = config.dataset.num_workers
    if source.has_images and config.dataset.dataloader_num_workers is None:
        workers = max(workers, IMAGE_WORKERS)
    prompts = PromptLoader(
        source,
        share=share,
        prompts_per_step=config.training.prompts_per_step,
        steps=batches,
        num_workers=workers,
        prefetch_steps=config.dataset.prefetch_steps,
        timeout_seconds=contract.timeout_seconds,
        folder=state_dir,
    )
    return prompts, longest


def start_evaluation(
    contract: Contract,
    rank: int,
    tokenizer: Any,
    rewards: Sequence[Reward],
    run_dir: Path,
    step: int,
    resumed: Source | None,
    tools: ToolSchemas | None = None,
) -> Evaluation | None:
    """Prepare the problems of evaluations, and read which ones an earlier attempt has made; collective.

    `tools`: see `load_data`.
    """
    past = on_main(lambda: read_evaluations(run_dir, step))
    evaluation = load_evaluation(
        contract.config, tokenizer, rewards, past, rank=rank, world_size=contract.world_size, tools=tools
    )
    if evaluation is not None:
        field = evaluation.config.dataset.field
        evaluation = replace(evaluation, data=settle_rows(EVALUATION, field, evaluation.data, contract, resumed))
        check_patience(evaluation.rewards, contract.timeout_seconds)
        for prompt in evaluation.prompts:
            begin_check(evaluation.rewards, prompt)
    return evaluation


def load_processing_class(model: ModelConfig, tokenizer: Any, model_config: Any) -> Any:
    """Return what checkpoints have beside the model: the tokenizer, or a processor with it. ConfigError as above."""
    if not has_vision(model_config):
        return tokenizer
    processor = load_processor(model)
    processor.tokenizer = tokenizer
    if model.chat_template is not None:
        processor.chat_template = model.chat_template
    return processor
