"""Advantages, losses, gradients and metrics against the installed TRL, by running its own GRPOTrainer on the tiny model."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import import_utils

from grpo_workload.advantage import group_advantages
from grpo_workload.batching import local_scale, micro_batches
from grpo_workload.loss import LossScale, grpo_loss, token_entropy, token_logprobs, token_means
from grpo_workload.metrics import summarise
from grpo_workload.rewards import Reward, score
from grpo_workload.types import Completion, Prompt, Sample

GENERATIONS = 4
NUM_SEQUENCES = 8
MAX_COMPLETION_LENGTH = 9
TEMPERATURE = 0.7
EOS = 2
# One group has rewards of None alone, another a completion that only one function scores.
VALUES = {
    "first": [1.0, 0.0, 0.5, None, None, None, None, 0.25],
    "second": [0.0, 2.0, None, None, 1.0, 1.0, 0.5, None],
}
WEIGHTS = [1.0, 0.3]


def first(**kwargs):
    return VALUES["first"]


def second(**kwargs):
    return VALUES["second"]


@pytest.fixture
def make_trainer(tiny_model, tmp_path, monkeypatch):
    # TRL imports any vLLM it finds, whether it supports that version or not; none is needed here.
    monkeypatch.setattr(import_utils, "is_vllm_available", lambda min_version=None: False)
    from trl import GRPOConfig, GRPOTrainer

    def make(**options) -> GRPOTrainer:
        config = GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=NUM_SEQUENCES,
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
        return trainer

    return make


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(3)

    def ids(length):
        return tuple(torch.randint(3, 259, (length,), generator=generator).tolist())

    advantages = torch.randn(NUM_SEQUENCES, generator=generator).tolist()
    result = []
    for index, advantage in enumerate(advantages):
        is_cut = index == 5
        tokens = ids(MAX_COMPLETION_LENGTH) if is_cut else (*ids(index + 1), EOS)[-MAX_COMPLETION_LENGTH:]
        completion = Completion(
            token_ids=tokens, logprobs=(0.0,) * len(tokens), text="", finish_reason="length" if is_cut else "stop", weight_version=0
        )
        prompt = Prompt(index=index, text="", token_ids=ids(3 + index % 4))
        result.append(Sample(prompt=prompt, completion=completion, reward=1.0, advantage=advantage))
    return result


@pytest.mark.parametrize("mask_truncated", [False, True])
@pytest.mark.parametrize("epsilon_high", [None, 0.28])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_loss_gradient_and_metrics(make_trainer, tiny_model, samples, loss_type, beta, epsilon_high, mask_truncated):
    options = {"loss_type": loss_type, "beta": beta, "epsilon": 0.2, "epsilon_high": epsilon_high}
    trainer = make_trainer(**options, mask_truncated_completions=mask_truncated)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    (whole,) = micro_batches(samples, NUM_SEQUENCES, EOS, num_micro_batches=1, mask_truncated_completions=mask_truncated)
    scale = local_scale([whole])
    generator = torch.Generator().manual_seed(5)
    # Wide enough that ratios are clipped on both sides.
    old, ref = (log_probs(model, whole).detach() + 0.4 * torch.randn(whole.mask_BC.shape, generator=generator) for _ in range(2))
    width = whole.completion_ids_BC.size(1)
    inputs = {
        "prompt_ids": whole.input_ids_BL[:, :-width],
        "prompt_mask": whole.attention_mask_BL[:, :-width],
        "completion_ids": whole.completion_ids_BC,
        "completion_mask": whole.mask_BC.long(),
        "advantages": whole.advantages_B,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "num_items_in_batch": whole.mask_BC.sum(),
    }
    expected = trainer._compute_loss(trainer.model, inputs)
    expected.backward()

    batch_logits = logits(model, whole)
    output = grpo_loss(
        token_logprobs(batch_logits, whole.completion_ids_BC, TEMPERATURE),
        old,
        whole.advantages_B,
        whole.mask_BC,
        scale=scale,
        max_completion_length=MAX_COMPLETION_LENGTH,
        ref_logprobs_BT=ref if beta else None,
        entropy_BT=token_entropy(batch_logits, TEMPERATURE),
        **options,
    )
    output.loss.backward()

    assert output.loss.item() == pytest.approx(expected.item(), abs=1e-5)
    theirs = dict(trainer.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, theirs[name].grad, atol=1e-5), name
    assert max(parameter.grad.abs().max() for parameter in model.parameters()) > 1e-3
    means = token_means({name: value.item() for name, value in output.metrics.items()})
    assert means["clip_ratio/low_mean"] > 0
    assert means["clip_ratio/high_mean"] > 0
    logged = trainer._metrics["train"]
    assert means == {name: pytest.approx(logged[name][0], abs=1e-5) for name in means}
    assert ("kl" in logged) == ("kl" in means)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_micro_batches_of_uneven_ranks_equal_the_whole_batch_on_a_model(tiny_model, samples, loss_type):
    def gradient(shares: list[list[Sample]], size: int, count: int) -> dict[str, torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        ranks = [micro_batches(share, size, EOS, num_micro_batches=count) for share in shares]
        scales = [local_scale(batches) for batches in ranks]
        scale = LossScale(num_sequences=sum(s.num_sequences for s in scales), num_tokens=sum(s.num_tokens for s in scales))
        for batch in (batch for batches in ranks for batch in batches):
            logprobs = log_probs(model, batch)
            options = {"loss_type": loss_type, "epsilon": 0.2, "epsilon_high": None, "beta": 0.0, "max_completion_length": 9}
            grpo_loss(logprobs, logprobs.detach(), batch.advantages_B, batch.mask_BC, scale=scale, **options).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    whole = gradient([samples], 8, 1)
    cut = gradient([samples[:5], samples[5:8], []], 2, 3)
    for name, expected in whole.items():
        assert torch.allclose(cut[name], expected, atol=1e-6), name


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
async def test_advantages_and_reward_metrics(make_trainer, samples, scale_rewards, monkeypatch):
    trainer = make_trainer(scale_rewards=scale_rewards)
    completion_ids = [list(sample.completion.token_ids) for sample in samples]
    # Sampling is the one thing that is not under test.
    monkeypatch.setattr(trainer, "_generate_single_turn", lambda *args: (completion_ids, None))
    inputs = [{"prompt": text} for text in ("ab", "abcd") for _ in range(GENERATIONS)]
    expected = trainer._generate_and_score_completions(inputs)

    rewards = [
        Reward(name=name, weight=weight, function=lambda prompts, completions, name=name: VALUES[name])
        for name, weight in zip(VALUES, WEIGHTS, strict=True)
    ]
    table = await score(rewards, [sample.prompt for sample in samples], [sample.completion for sample in samples])
    assert torch.allclose(group_advantages(table.totals, GENERATIONS, scale_rewards), expected["advantages"], atol=1e-5)
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
    assert logged.keys() == metrics.keys() - {"step_time", "tokens_per_second"}
    assert {name: metrics[name] for name in logged} == {name: pytest.approx(value, abs=1e-5) for name, value in logged.items()}


def logits(model, batch):
    width = batch.completion_ids_BC.size(1)
    inputs = {"input_ids": batch.input_ids_BL, "attention_mask": batch.attention_mask_BL, "position_ids": batch.position_ids_BL}
    return model(**inputs, logits_to_keep=width + 1).logits[:, :-1]


def log_probs(model, batch):
    return token_logprobs(logits(model, batch), batch.completion_ids_BC, TEMPERATURE)
