"""Advantages, losses, gradients and metrics equal those of TRL: its GRPOTrainer runs on the tiny model."""

import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import import_utils

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm import mismatch
from grpo_workload.algorithm.advantage import group_advantages, step_advantages
from grpo_workload.algorithm.loss import LossScale, grpo_loss, token_means
from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.algorithm.reuse import batch_of
from grpo_workload.algorithm.samples import Episode, Prompt
from grpo_workload.algorithm.step_plan import EpisodeFact, Fact, plan
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.loss.batch_loss import batch_loss
from grpo_workload.policy.loss.entropy_cut import find_cut
from grpo_workload.policy.step.weight_decay import decay_weights
from grpo_workload.rewards.scorer import Function
from grpo_workload.rewards.scoring import Reward, score
from grpo_workload.rewards.table import tabulate
from grpo_workload.training.rollout import Generation, Rollout
from grpo_workload.training.step_metrics import summarise
from grpo_workload.training.work import prepare
from support.trainer.samples import make_sample

GENERATIONS = 4
NUM_SEQUENCES = 8
MAX_COMPLETION_LENGTH = 9
TEMPERATURE = 0.7
EOS = 2
CLIP_MAX = 1.2
# Some completions are scored by one function only, one by none.
VALUES = {
    "first": [1.0, 0.0, 0.5, None, None, None, None, 0.25],
    "second": [0.0, 2.0, None, None, 1.0, 1.0, 0.5, None],
}
WEIGHTS = [1.0, 0.3]


def first(**kwargs):
    return VALUES["first"]


def second(**kwargs):
    return VALUES["second"]


REWARDS = [
    Reward(name=name, weight=weight, scorer=Function(lambda prompts, completions, name=name: VALUES[name]))
    for name, weight in zip(VALUES, WEIGHTS, strict=True)
]


@pytest.fixture
def make_trainer(tiny_model, tmp_path, monkeypatch):
    # TRL imports any vLLM that is installed, even an unsupported version; the test needs none.
    monkeypatch.setattr(import_utils, "is_vllm_available", lambda min_version=None: False)
    from trl import GRPOConfig, GRPOTrainer

    def make(correction="none", **options):
        corrects = correction != "none"
        options |= {"vllm_importance_sampling_mode": correction} if corrects else {}
        config = GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=options.pop("per_device_train_batch_size", NUM_SEQUENCES),
            vllm_importance_sampling_clip_max=CLIP_MAX,
            num_generations=GENERATIONS,
            max_completion_length=MAX_COMPLETION_LENGTH,
            temperature=TEMPERATURE,
            reward_weights=WEIGHTS,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            disable_tqdm=True,
            **options,
        )
        dataset = Dataset.from_list([{"prompt": "ab"}, {"prompt": "abcd"}])
        trainer = GRPOTrainer(model=str(tiny_model), reward_funcs=[first, second], args=config, train_dataset=dataset)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = corrects
        return trainer

    return make


@pytest.fixture(scope="module")
def samples():
    generator = torch.Generator().manual_seed(3)

    def ids(length):
        return tuple(torch.randint(3, 259, (length,), generator=generator).tolist())

    advantages = torch.randn(NUM_SEQUENCES, generator=generator).tolist()
    result = []
    for index, advantage in enumerate(advantages):
        is_cut = index == 5
        tokens = ids(MAX_COMPLETION_LENGTH) if is_cut else (*ids(index + 1), EOS)[-MAX_COMPLETION_LENGTH:]
        ends = {"finish_reason": "length" if is_cut else "stop", "logprobs": (0.0,) * len(tokens)}
        result.append(make_sample(ids(3 + index % 4), tokens, index=index, advantage=advantage, **ends))
    return result


@pytest.mark.parametrize("correction", ["none", "token_truncate", "sequence_mask"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "grpo"},
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"loss_type": "dr_grpo"},
        {"loss_type": "bnpo", "delta": 1.4},
        {"loss_type": "cispo", "epsilon_high": 1.1},
        {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02},
        {"loss_type": "cispo", "importance_sampling_level": "sequence", "epsilon_high": 1.02},
        {"loss_type": "dapo", "entropy_coef": 0.05},
        {"loss_type": "grpo", "entropy_coef": 0.05, "top_entropy_quantile": 0.45},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_loss_gradient_and_metrics(make_trainer, tiny_model, samples, options, beta, correction):
    options = {"beta": beta} | options
    trainer = make_trainer(correction, **options)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    head, whole = LogprobHead(model, trains_entropy="entropy_coef" in options), micro_batch(samples)
    scale = LossScale(num_sequences=NUM_SEQUENCES, num_tokens=int(whole.mask_BC.sum()))
    generator = torch.Generator().manual_seed(5)

    def noisy(deviation):
        with torch.no_grad():
            return head.per_token(model, whole, TEMPERATURE)[0] + deviation * torch.randn(
                whole.mask_BC.shape, generator=generator
            )

    # Wide enough to clip ratios on both sides and to mask sequences.
    old, ref, sampling = noisy(0.4), noisy(0.4), noisy(0.3)
    weights = mismatch.weights(mismatch.log_ratios(old, sampling, whole.mask_BC), correction, None, CLIP_MAX)
    if weights is not None:
        assert 0 < (weights == (CLIP_MAX if correction == "token_truncate" else 0)).sum() < weights.numel()
    inputs = padded(samples) | {
        "advantages": whole.advantages_B,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "importance_sampling_ratio": weights,
        "num_items_in_batch": whole.mask_BC.sum(),
    }
    expected = trainer._compute_loss(trainer.model, inputs)

    logprobs, entropy, _ = head.per_token(model, whole, TEMPERATURE)
    if "top_entropy_quantile" in options:
        cut = find_cut(entropy[whole.mask_BC > 0], options["top_entropy_quantile"])
        assert cut.num_tokens == math.ceil(options["top_entropy_quantile"] * scale.num_tokens), (
            "another share has no ties"
        )
        scale = replace(scale, entropy_cut=cut)
    output = grpo_loss(
        logprobs,
        old,
        whole.advantages_B,
        whole.mask_BC,
        scale=scale,
        training=TrainingConfig(max_completion_length=MAX_COMPLETION_LENGTH, **options),
        ref_logprobs_BT=ref if beta else None,
        entropy_BT=entropy,
        weights_BT=weights,
    )
    compare(trainer, expected, model, output.loss)
    means = token_means({name: value.item() for name, value in output.metrics.items()}, scale.num_tokens)
    # TRL runs the model on every completion, as here.
    means["entropy"] = means.pop("trained/entropy")
    assert all(value > 0 for name, value in means.items() if "clip" in name)
    logged = trainer._metrics["train"]
    assert means == {name: pytest.approx(logged[name][0], abs=1e-5) for name in means}
    assert {name for name in logged if name in ("kl", "cispo_clip_ratio") or name.endswith("_mean")} <= means.keys()


@pytest.mark.parametrize(
    ("scale_rewards", "aggregation"),
    [(scale, "sum_then_normalize") for scale in ("group", "batch", "none")] + [("group", "normalize_then_sum")],
)
async def test_advantages_and_reward_metrics(make_trainer, samples, scale_rewards, aggregation, monkeypatch):
    options = {"scale_rewards": scale_rewards, "multi_objective_aggregation": aggregation}
    trainer = make_trainer(**options)
    completion_ids = [list(sample.completion.token_ids) for sample in samples]
    # Sampling is not under test.
    monkeypatch.setattr(trainer, "_generate_single_turn", lambda *args: (completion_ids, None))
    inputs = [{"prompt": prompt.text} for prompt in prompts_of(trainer)]
    expected = trainer._generate_and_score_completions(inputs)

    table = await score(REWARDS, [sample.prompt for sample in samples], [sample.completion for sample in samples])
    training = TrainingConfig(num_generations=GENERATIONS, **options)
    advantages = step_advantages(table.totals, table.values, WEIGHTS, [1] * NUM_SEQUENCES, training)
    assert advantages == pytest.approx(expected["advantages"].tolist(), abs=1e-5)
    assert expected["advantages"].abs().max() > 0.1
    metrics = summarise(
        table,
        num_generations=GENERATIONS,
        scale_rewards=scale_rewards,
        prompt_lengths=[len(row["prompt"]) for row in inputs],
        completion_lengths=[len(ids) for ids in completion_ids],
        truncated=[sample.completion.finish_reason == "length" for sample in samples],
        step_time=2.0,
    )
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    logged = {name: value for name, value in logged.items() if not name.startswith("profiling/")}
    own = {"step_time", "tokens_per_second", *(f"rewards/{name}/unscored" for name in VALUES)}
    assert logged.keys() == metrics.keys() - own
    if aggregation == "normalize_then_sum":  # TRL's counts no groups then
        metrics["frac_reward_zero_std"] = logged["frac_reward_zero_std"]
    assert {name: metrics[name] for name in logged} == {
        name: pytest.approx(value, abs=1e-5) for name, value in logged.items()
    }


@pytest.mark.parametrize(
    ("loss_type", "correction"),
    [("grpo", "sequence_mask"), ("dapo", "token_truncate"), ("dr_grpo", "none"), ("bnpo", "none")],
)
async def test_steps_that_share_a_generation(make_trainer, tiny_model, samples, monkeypatch, loss_type, correction):
    """TRL's `train()` takes four steps on one generation; only its sampling and shuffling are not under test."""
    common = {"loss_type": loss_type, "epsilon": 0.05, "learning_rate": 3e-3, "num_iterations": 2, "max_steps": 4}
    common["weight_decay"] = 0.5
    trainer = make_trainer(
        correction,
        **common,
        per_device_train_batch_size=GENERATIONS,
        steps_per_generation=2,
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        save_strategy="no",
        logging_steps=1,
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    head = LogprobHead(model)
    prompts = prompts_of(trainer)
    table = await score(REWARDS, prompts, [sample.completion for sample in samples])
    advantages = group_advantages(table.totals, GENERATIONS, "group")
    own = [
        replace(sample, prompt=prompt, advantage=advantage)
        for sample, prompt, advantage in zip(samples, prompts, advantages, strict=True)
    ]
    # The generator differs from the trainer by enough to be clipped or masked.
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        exact = head.per_token(model, micro_batch(own), TEMPERATURE).logprobs_BT
    noisy = (exact + 0.3 * torch.randn(exact.shape, generator=generator)).tolist()
    own = [
        replace(one, completion=replace(one.completion, logprobs=tuple(row[: len(one.completion.token_ids)])))
        for one, row in zip(own, noisy, strict=True)
    ]

    completions = [list(one.completion.token_ids) for one in own], [list(one.completion.logprobs) for one in own]
    monkeypatch.setattr(trainer, "_generate_single_turn", lambda *args: completions)
    from trl.trainer import grpo_trainer

    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda batch: batch)
    losses, compute_loss = [], trainer._compute_loss
    monkeypatch.setattr(trainer, "_compute_loss", lambda *args: losses.append(compute_loss(*args)) or losses[-1])
    trainer.train()
    logged = [line for line in trainer.state.log_history if "clip_ratio/region_mean" in line]

    training = TrainingConfig(
        **common,
        steps_per_generation=2,
        num_generations=GENERATIONS,
        prompts_per_step=1,
        max_completion_length=MAX_COMPLETION_LENGTH,
        temperature=TEMPERATURE,
        importance_sampling_correction=correction,
        importance_sampling_clip_max=CLIP_MAX,
        per_device_train_batch_size=3,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate, weight_decay=0.0)
    decay_weights(optimizer, model, training.weight_decay)

    @torch.no_grad()
    def logprobs(batch, temperature, truncation, penalties):
        return head.per_token(model, batch, temperature, truncation, penalties).logprobs_BT

    halves = [own[:GENERATIONS], own[GENERATIONS:]]
    rollouts = {
        batch: Rollout(step=batch, samples=half, table=table, facts=[[fact(one) for one in half]])
        for batch, half in enumerate(halves)
    }
    config = SimpleNamespace(training=training)
    policy = SimpleNamespace(logprobs=logprobs, shares_prompts=False, group=None)
    run = SimpleNamespace(config=config, rank=0, policy=policy)
    works = prepare(run, Generation(steps=range(4), rollouts=rollouts, timeouts={}, generated_tokens=0))
    assert len(losses) == len(logged) == 4
    for step, (expected, line) in enumerate(zip(losses, logged, strict=True)):
        work, sums = works[batch_of(step, training)], defaultdict(float)
        for batch in work.micro_batches:
            known = head.per_token(model, batch, TEMPERATURE)
            output, _ = batch_loss(known, batch, training, scale=work.plan.scale)
            output.loss.backward()
            for name, value in {"loss": output.loss, **output.metrics}.items():
                sums[name] += value.item()
        assert sums.pop("loss") == pytest.approx(expected.item(), abs=1e-5), step
        means = token_means(sums, work.plan.scale.num_tokens)
        for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
            assert means[name] == pytest.approx(line[name], abs=1e-5), step
        assert (means["clip_ratio/region_mean"] > 0) == (step > 0), "only the first step trains with the old weights"
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        assert norm.item() == pytest.approx(float(line["grad_norm"]), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("options", "correction"),
    [
        ({"loss_type": "dapo", "epsilon_high": 0.28}, "token_truncate"),
        ({"loss_type": "grpo", "beta": 0.04}, "sequence_mask"),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02}, "sequence_truncate"),
        ({"loss_type": "dr_grpo", "entropy_coef": 0.05, "top_entropy_quantile": 0.4}, "token_mask"),
        ({"loss_type": "cispo", "epsilon_high": 1.1, "beta": 0.04}, "none"),
        ({"loss_type": "bnpo", "off_policy_mask_threshold": 0.02, "beta": 0.04}, "sequence_mask"),
        ({"loss_type": "grpo", "off_policy_mask_threshold": 0.02}, "none"),
    ],
    ids=lambda one: one if isinstance(one, str) else one["loss_type"],
)
def test_conversations_with_tools(make_trainer, tiny_model, samples, monkeypatch, options, correction):
    """TRL generates, with only its sampling and its calls of tools scripted, and trains on its own `tool_mask`."""
    trainer = make_trainer(correction, **options)
    trainer.tools = [print]
    prompts = prompts_of(trainer)
    generator = torch.Generator().manual_seed(11)
    own = [
        replace(sample, prompt=prompt, completion=conversation(sample.completion, number, generator))
        for number, (sample, prompt) in enumerate(zip(samples, prompts, strict=True))
    ]
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    head = LogprobHead(model, trains_entropy="entropy_coef" in options)
    with torch.no_grad():
        exact_BC = head.per_token(model, micro_batch(own), TEMPERATURE).logprobs_BT
        noisy_BC = exact_BC + 0.3 * torch.randn(exact_BC.shape, generator=generator)
    own = [
        replace(one, completion=with_logprobs(one.completion, row))
        for one, row in zip(own, noisy_BC.tolist(), strict=True)
    ]

    answers = [list(one.completion.token_ids) for one in own], [list(one.completion.logprobs) for one in own]
    masks = [[int(place in one.completion.own_places) for place in range(len(one.completion.token_ids))] for one in own]
    calls = [sum(one.completion.episode.num_calls for one in own), 2]
    monkeypatch.setattr(trainer, "_generate_single_turn", lambda *args: answers)
    texts = [prompt.text for prompt in prompts]
    monkeypatch.setattr(
        trainer, "_tool_call_loop", lambda *args: (masks, texts, *answers, *calls, [[]] * NUM_SEQUENCES)
    )
    # Not every conversation ends by itself.
    inputs = trainer._generate_and_score_completions([{"prompt": text} for text in texts])
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}

    training = TrainingConfig(
        **options,
        num_generations=GENERATIONS,
        max_completion_length=MAX_COMPLETION_LENGTH,
        importance_sampling_correction=correction,
        importance_sampling_clip_max=CLIP_MAX,
    )
    own = [replace(one, advantage=advantage) for one, advantage in zip(own, inputs["advantages"].tolist(), strict=True)]
    whole, made = micro_batch(own), plan([[fact(one) for one in own]], training)
    assert whole.mask_BC.sum() == made.scale.num_tokens == inputs["num_items_in_batch"] < sum(map(len, answers[0]))
    if correction != "none":
        theirs = inputs["importance_sampling_ratio"]
        ratios = mismatch.log_ratios(exact_BC, whole.sampling_logprobs_BC, whole.mask_BC)
        ours = mismatch.weights(ratios, correction, None, CLIP_MAX)
        sums, largest = mismatch.tally(ratios, ours, whole.mask_BC)
        described = mismatch.describe(sums, largest, made.scale.num_tokens)
        names = [f"importance_sampling_ratio/{which}" for which in ("min", "mean", "max")]
        for name in (*names, "sampling_logp_difference/mean", "sampling_logp_difference/max"):
            assert described[f"trained/sampling/{name}"] == pytest.approx(logged[f"sampling/{name}"], abs=1e-5), name
        assert (theirs == CLIP_MAX).any() or (theirs == 0).any()

    with torch.no_grad():  # the policy has moved since
        for mine, other in zip(model.parameters(), trainer.model.parameters(), strict=True):
            mine += 0.02 * torch.randn(mine.shape, generator=generator)
            other.copy_(mine)
    trainer._metrics["train"].clear()
    ref_BC = exact_BC if "beta" in options else None  # TRL's reference is the model that the trainer began with
    inputs.setdefault("old_per_token_logps", scattered(exact_BC, masks))
    expected = trainer._compute_loss(trainer.model, inputs)

    batch, scale = replace(whole, old_logprobs_BC=exact_BC), made.scale
    known = head.per_token(model, batch, TEMPERATURE)
    if "top_entropy_quantile" in options:
        scale = replace(scale, entropy_cut=find_cut(known.entropy_BT[whole.mask_BC > 0], 0.4))
    output, _ = batch_loss(known, batch, training, scale=scale, ref_logprobs_BT=ref_BC)
    compare(trainer, expected, model, output.loss)
    means = token_means({name: value.item() for name, value in output.metrics.items()}, scale.num_tokens)
    means["entropy"] = means.pop("trained/entropy")
    if "off_policy_mask_threshold" in options:
        negative = (whole.mask_BC.sum(dim=1) * (whole.advantages_B < 0)).sum() / scale.num_tokens
        masked = means.pop("trained/sampling/off_policy_mask/masked_fraction")
        assert 0 < masked < negative, "some of those with a negative advantage"
    found = {name: values[0] for name, values in trainer._metrics["train"].items()}
    assert means == {name: pytest.approx(found[name], abs=1e-5) for name in means}

    facts = [fact(one) for one in own]
    metrics = summarise(
        tabulate({"first": 1.0}, [[1.0] * NUM_SEQUENCES]),
        num_generations=GENERATIONS,
        scale_rewards="group",
        prompt_lengths=[len(prompt.token_ids) for prompt in prompts],
        completion_lengths=[one.tokens for one in facts],
        truncated=[one.is_truncated for one in facts],
        step_time=1.0,
        episodes=[one.episode._replace(failed_calls=number < 2) for number, one in enumerate(facts)],
    )
    counted = {name for name in logged if name.startswith(("completions/", "tools/", "num_tokens"))}
    assert {name: metrics[name] for name in counted} == {
        name: pytest.approx(logged[name], abs=1e-5) for name in counted
    }
    assert {"tools/call_frequency", "tools/failure_frequency"} < counted


def compare(trainer, expected, model, loss):
    """Compare the loss and the gradients of TRL's trainer with those of the same model."""
    expected.backward()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    theirs = dict(trainer.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, theirs[name].grad, atol=1e-5), name
    assert max(parameter.grad.abs().max() for parameter in model.parameters()) > 1e-3


def prompts_of(trainer):
    """Return the prompt of each sequence."""
    return [
        Prompt(index=0, text=text, token_ids=tuple(trainer.processing_class(text)["input_ids"]))
        for text in ("ab", "abcd")
        for _ in range(GENERATIONS)
    ]


def conversation(completion, number, generator):
    """Put one result of a tool, or two, into a completion; some have none, and some end with one."""

    def result():
        return tuple(torch.randint(3, 259, (1 + number % 3,), generator=generator).tolist())

    tokens, context = completion.token_ids, []
    if number == 5:  # it was cut, and ends in a result: nothing more was sampled
        ids = result()
        tokens, context = (*tokens[:4], *ids), [(4, 4 + len(ids))]
    elif number % 4:
        for place in range(1, len(tokens), 3)[:2]:
            ids, at = result(), place + sum(stop - start for start, stop in context)
            tokens = (*tokens[:at], *ids, *tokens[at:])
            context.append((at, at + len(ids)))
    episode = Episode(context=tuple(context), num_turns=len(context) + 1, num_calls=len(context))
    return replace(completion, token_ids=tokens, logprobs=(0.0,) * len(tokens), episode=episode)


def with_logprobs(completion, row):
    """Give a completion the log-probabilities of its own tokens, which begin a row; 0 for the others."""
    values = dict(zip(completion.own_places, row, strict=False))
    return replace(completion, logprobs=tuple(values.get(place, 0.0) for place in range(len(completion.token_ids))))


def scattered(values_BC, masks):
    """Put values of own tokens into TRL's rows, which have places for the others too; those hold what is not read."""
    result = torch.full((len(masks), max(map(len, masks))), 7.0)
    for row, values, mask in zip(result, values_BC, masks, strict=True):
        places = [place for place, is_own in enumerate(mask) if is_own]
        row[places] = values[: len(places)]
    return result


def padded(samples):
    """Return inputs in TRL's form: prompts padded on the left, completions on the right."""

    def pad(rows, side):
        rows = [torch.tensor(row) for row in rows]
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(row) for row in rows], batch_first=True, padding_side=side
        )
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=EOS, padding_side=side), mask

    prompt_ids, prompt_mask = pad([sample.prompt.token_ids for sample in samples], "left")
    completion_ids, completion_mask = pad([sample.completion.token_ids for sample in samples], "right")
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
    }


def fact(sample):
    """Return what all ranks know of a sample."""
    completion = sample.completion
    return Fact(
        prompt_tokens=sum(completion.num_read(sample.prompt)) - completion.num_own,
        tokens=completion.num_own,
        is_truncated=completion.finish_reason == "length",
        reward=sample.reward,
        advantage=sample.advantage,
        episode=completion.episode and EpisodeFact.of(completion.episode),
    )
