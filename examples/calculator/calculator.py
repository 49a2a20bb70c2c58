"""A tool, rows and a reward: a model learns to multiply with a calculator (job.yaml)."""

import re


def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def exchange(a: int, b: int) -> list[dict]:
    """Return a question, the call that answers it, the tool's result, and the answer."""
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
    return [
        {"role": "user", "content": f"What is {a} * {b}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "multiply", "content": str(a * b)},
        {"role": "assistant", "content": f"{a} * {b} = {a * b}"},
    ]


def prepare(row: dict) -> dict:
    """Turn a problem of reasoning-gym into chat messages; two exchanges show a small model the form of a call."""
    a, b = map(int, re.findall(r"\d+", row["question"]))
    system = {"role": "system", "content": "Use the tool multiply(a, b)."}
    question = {"role": "user", "content": f"What is {a} * {b}?"}
    return {"prompt": [system, *exchange(12, 31), *exchange(45, 7), question], "answer": str(a * b)}


def right(completions: list[list[dict]], answer: list[str], **_) -> list[float]:
    """Return 1 where the last number of the last turn is the answer, and that turn calls nothing."""
    return [float(_last_number(turns[-1]) == product) for turns, product in zip(completions, answer, strict=True)]


def _last_number(turn: dict) -> str | None:
    found = re.findall(r"\d+", turn["content"])
    return found[-1] if found and not turn.get("tool_calls") else None
