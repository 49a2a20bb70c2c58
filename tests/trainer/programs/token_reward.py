"""A reward that random weights can earn, since their tokens vary, and a reward that crashes."""

import os
import signal


def even_tokens(prompts, completions, completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def crashes(**columns):
    os.kill(os.getpid(), signal.SIGSEGV)
