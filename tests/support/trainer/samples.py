"""Completions and samples by their tokens, for tests of training."""

import torch

from grpo_workload.algorithm.samples import Completion, Prompt, Sample


def make_completion(token_ids, **fields):
    """Return a completion of these tokens, of which each had the log-probability -1; `fields` replace its own."""
    usual = {"logprobs": (-1.0,) * len(token_ids), "text": "", "finish_reason": "stop", "weight_version": 0}
    return Completion(token_ids=tuple(token_ids), **usual | fields)


def make_sample(prompt_ids, token_ids, *, index=0, images=None, reward=1.0, advantage=1.0, **fields):
    """Return a sample of these tokens of prompt and completion; `fields` are the completion's."""
    prompt = Prompt(index=index, text="", token_ids=tuple(prompt_ids), images=images)
    return Sample(prompt=prompt, completion=make_completion(token_ids, **fields), reward=reward, advantage=advantage)


def random_samples(*lengths, vocabulary=128, seed=0):
    """Return samples of random words, of so many tokens of prompt and completion each."""
    random = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, vocabulary, (sum(one),), generator=random).tolist() for one in lengths]
    return [make_sample(ids[:prompt], ids[prompt:]) for ids, (prompt, _) in zip(rows, lengths, strict=True)]
