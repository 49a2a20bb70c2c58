"""A reward that random weights can earn, since their tokens vary, and the same close to float32's largest number."""

import random


def even_tokens(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **columns):
    log_metric("begun", trainer_state.global_step)
    log_metric("drawn", random.random())
    log_extra("length", [len(ids) for ids in completion_ids])
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def huge(**columns):
    return [3e38 * share for share in even_tokens(**columns)]
