"""Steps as a plain loop takes them, for programs to compare with: torch's AdamW on transformers' eager model.

In float32, one sequence after the other, with whole logits. The product only says where adapters go.
"""

import copy

import torch
from transformers import AutoModelForCausalLM, Trainer

from grpo_workload.policy.adapters.lora import add_adapters


def plain_steps(config, steps, device):
    """Yield the norm of the gradients of each step, and the trained weights after it, by name, in host memory."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32, **eager)
    model.eval()  # engines sample without dropout
    add_adapters(model, config)
    model.to(device)
    training = config.training
    reference = copy.deepcopy(model) if training.beta else None
    decaying = Trainer.get_decay_parameter_names(None, model)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    groups = [
        {"params": [one for name, one in trained.items() if name in decaying], "weight_decay": training.weight_decay},
        {"params": [one for name, one in trained.items() if name not in decaying], "weight_decay": 0.0},
    ]
    betas = (training.adam_beta1, training.adam_beta2)
    optimizer = torch.optim.AdamW(groups, lr=training.learning_rate, betas=betas, eps=training.adam_epsilon)
    assert training.lr_scheduler_type in ("constant", "linear")
    for number, samples in enumerate(steps):
        if training.lr_scheduler_type == "linear":
            for group in optimizer.param_groups:
                group["lr"] = training.learning_rate * (1 - number / training.max_steps)
        num_tokens = sum(len(sample.completion.token_ids) for sample in samples)
        cut, num_chosen = 0.0, num_tokens
        if training.top_entropy_quantile < 1:
            with torch.no_grad():
                entropies = torch.cat([said(model, sample, training)[2] for sample in samples])
            cut = float(entropies.quantile(1 - training.top_entropy_quantile))
            num_chosen = int((entropies >= cut).sum())
        for sample in samples:
            logprobs, whole, entropy = said(model, sample, training)
            is_chosen = entropy >= cut
            ratio = (logprobs - logprobs.detach()).exp()  # 1, but it has a gradient
            loss = -sample.advantage * (ratio * is_chosen).sum() / num_tokens
            loss = loss - training.entropy_coef * (entropy * is_chosen).sum() / num_chosen
            if reference is not None:
                with torch.no_grad():
                    theirs = said(reference, sample, training)[1]
                log_ratio = theirs - whole
                loss = loss + training.beta * ((log_ratio.exp() - log_ratio - 1) * ratio).sum() / num_tokens
            loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(trained.values(), training.max_grad_norm))
        optimizer.step()
        optimizer.zero_grad()
        yield norm, {name: one.detach().cpu().clone() for name, one in trained.items()}


def said(model, sample, training):
    """Return what a model says of a completion's tokens: [tokens] each.

    Log-probabilities under penalties and without them, and entropies without.
    """
    before, own = sample.prompt.token_ids, sample.completion.token_ids
    ids = torch.tensor([[*before, *own]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(before) - 1 : -1].float()
    whole = (logits / training.temperature).log_softmax(-1)
    factors, less = torch.ones_like(logits), torch.zeros_like(logits)
    for place in range(len(own)):
        came = [*before, *own[:place]]
        by = training.repetition_penalty
        factors[place, came] = torch.where(logits[place, came] > 0, 1 / by, by)
        for word in own[:place]:
            less[place, word] += training.frequency_penalty
    logprobs = ((logits * factors - less) / training.temperature).log_softmax(-1)
    picked = ids[0, len(before) :].unsqueeze(1)
    return logprobs.gather(1, picked)[:, 0], whole.gather(1, picked)[:, 0], -(whole.exp() * whole).sum(-1)
