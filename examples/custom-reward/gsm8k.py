"""Rows of openai/gsm8k as prompts, and a reward for answers that are easy to read."""

import re

INSTRUCTION = "Think step by step. Put the number alone on the last line, after ####."
FORMAT = re.compile(r"\n#### -?[\d,]+(\.\d+)?\s*\Z")


def prepare(row):
    """Return the row to use: `prompt` as chat messages, and the columns that rewards read."""
    thoughts, _, number = row["answer"].rpartition("####")
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": row["question"]}]
    return {"prompt": messages, "solution": number.strip().replace(",", ""), "num_steps": thoughts.count("\n")}


def readable(completions, num_steps, **columns):
    """Return 0.5 for an answer in the format, 1 if it also has a line for each step, and 0 for all others."""
    rewards = []
    for messages, steps in zip(completions, num_steps, strict=True):
        text = messages[-1]["content"]
        in_format = FORMAT.search(text) is not None
        rewards.append(0.5 * in_format + 0.5 * (in_format and text.count("\n") >= steps))
    return rewards
