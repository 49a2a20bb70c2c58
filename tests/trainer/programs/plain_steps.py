"""Steps as a plain loop takes them, for programs to compare with: torch's AdamW on transformers' eager model.

In float32, one sequence after the other, with whole logits. The product only says where adapters go.
"""

import torch
from transformers import AutoModelForCausalLM

from grpo_workload.policy.adapters.lora import add_adapters


def plain_steps(config, steps, device):
    """Yield the norm of the gradients of each step, and the trained weights after it, by name, in host memory."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32, **eager)
    model.eval()  # engines sample without dropout
    add_adapters(model, config)
    model.to(device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training = config.training
    optimizer = torch.optim.AdamW(
        trained,
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        weight_decay=training.weight_decay,
    )
    for samples in steps:
        num_tokens = sum(len(sample.completion.token_ids) for sample in samples)
        for sample in samples:
            ids = torch.tensor([[*sample.prompt.token_ids, *sample.completion.token_ids]], device=device)
            first = len(sample.prompt.token_ids)
            logits = model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1].float()
            logprobs = logits.log_softmax(-1).gather(1, ids[0, first:].unsqueeze(1))
            (-sample.advantage * logprobs.sum() / num_tokens).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(trained, training.max_grad_norm))
        optimizer.step()
        optimizer.zero_grad()
        yield norm, {name: one.detach().cpu().clone() for name, one in model.named_parameters() if one.requires_grad}
