"""A reward that random weights can earn: whoever knows no language still draws different tokens."""


def even_tokens(prompts, completions, completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
