"""A completion of completions.jsonl as text for a terminal: who said what, calls, results, and how it went. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from rich.text import Text

from grpo_spec.words import counted

Row = Mapping[str, Any]


def transcript(row: Row) -> Text:
    """Return one completion: its prompt's last message, each turn with its calls, each result, and what it earned."""
    shown = Text()
    shown.append(f"step {row['step'] + 1}  {_outcome(row)}\n", style="bold")
    prompt = row.get("prompt") or ""
    for message in [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else prompt[-1:]:
        _say(shown, message["role"], message.get("content"), "dim")
    said = row.get("completion") or []
    if isinstance(said, str):
        _say(shown, "model", said, "")
        return shown
    counts = iter((row.get("episode") or {}).get("tokens", ()))
    was_own = False
    for message in said:
        is_own = message["role"] == "assistant"
        is_first = is_own or was_own  # the results of one turn are counted together
        number = next(counts, None) if is_first else None  # not counted if turns are another sequence's
        count = "" if number is None else f" · {counted(number, 'token')}" + ("" if is_own else " read")
        was_own = is_own
        name = f" {message['name']}" if message.get("name") else ""
        _say(
            shown,
            f"{'model' if is_own else message['role']}{name}{count}",
            message.get("content"),
            "" if is_own else "dim",
        )
        for call in message.get("tool_calls") or ():
            function = call["function"]
            _say(shown, "calls", f"{function['name']}({json.dumps(function['arguments'], ensure_ascii=False)})", "cyan")
    return shown


def _outcome(row: Row) -> str:
    return " · ".join(chain(_scores(row), _facts(row.get("episode") or {})))


def _scores(row: Row) -> Iterator[str]:
    if row.get("reward") is not None:
        yield f"reward {row['reward']:.3g}"
    if row.get("advantage") is not None and row.get("reward") is not None:
        yield f"advantage {row['advantage']:+.3g}"


def _facts(episode: Row) -> Iterator[str]:
    if "lost" in episode:
        yield f"lost ({episode['lost']}), counts nowhere: {_safe(episode['failure'])}"
    if "turns" in episode:
        calls, failed = episode["calls"], episode["failed_calls"]
        yield f"{counted(episode['turns'], 'turn')}, {counted(calls, 'call')}" + (
            f" ({failed} failed)" if failed else ""
        )
        yield f"{episode['call_seconds']:.2f} s in calls"
    if episode.get("wait_seconds", 0) >= 0.1:
        yield f"waited {episode['wait_seconds']:.1f} s for a session"
    if episode.get("retries"):
        yield f"began again {counted(episode['retries'], 'time')}"
    if episode.get("is_truncated"):
        yield "truncated"


def _say(shown: Text, who: str, what: Any, style: str) -> None:
    text = what if isinstance(what, str) else json.dumps(what, ensure_ascii=False) if what else ""
    lines = _safe(text).splitlines() or [""]
    shown.append(f"  {_safe(who)}\n", style="bold dim")
    for line in lines:
        shown.append(f"    {line}\n", style=style)


def _safe(text: str) -> str:
    """Replace what a terminal would obey: a model or a tool has written it."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text)
