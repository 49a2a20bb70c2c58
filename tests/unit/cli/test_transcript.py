"""A completion in a terminal: who said what, calls, results, tokens of both kinds, and how it went."""

from grpo_cli.screen.transcript import transcript

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}
FACTS = {"turns": 2, "calls": 2, "failed_calls": 1, "call_seconds": 0.5, "wait_seconds": 3.25, "retries": 1}
FACTS |= {"is_truncated": True, "tokens": [9, 14, 5]}


def test_an_episode_is_shown_turn_by_turn() -> None:
    turns = [
        {"role": "assistant", "content": "I add.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "tool", "name": "add", "content": "an\nerror"},
        {"role": "assistant", "content": "It is 3."},
    ]
    prompt = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Add."}]
    row = {"step": 6, "prompt": prompt, "completion": turns, "reward": 0.5, "advantage": -0.25, "episode": FACTS}
    assert transcript(row).plain.splitlines() == [
        "step 7  reward 0.5 · advantage -0.25 · 2 turns, 2 calls (1 failed) · 0.50 s in calls · "
        "waited 3.2 s for a session · began again 1 time · truncated",
        "  user",
        "    Add.",
        "  model · 9 tokens",
        "    I add.",
        "  calls",
        '    add({"a": 1, "b": "ü"})',
        "  calls",
        '    add({"a": 1, "b": "ü"})',
        "  tool add · 14 tokens read",
        "    3",
        "  tool add",
        "    an",
        "    error",
        "  model · 5 tokens",
        "    It is 3.",
    ]


def test_turns_that_are_not_counted_have_no_number_of_tokens() -> None:
    facts = {name: fact for name, fact in FACTS.items() if name != "tokens"} | {"sequences": 2}
    said = [{"role": "assistant", "content": "I add."}, {"role": "tool", "name": "add", "content": "3"}]
    row = {"step": 0, "prompt": "Add.", "completion": said, "reward": 1.0, "advantage": 0.5, "episode": facts}
    assert transcript(row).plain.splitlines()[-4:] == ["  model", "    I add.", "  tool add", "    3"]


def test_a_lost_episode_says_what_failed_and_a_plain_completion_what_it_says() -> None:
    lost = {"lost": "timeout", "failure": "it hangs", "retries": 2}
    row = {"step": 0, "prompt": "Add.", "completion": [], "reward": None, "advantage": 0.0, "episode": lost}
    first, *rest = transcript(row).plain.splitlines()
    assert first == "step 1  lost (timeout), counts nowhere: it hangs · began again 2 times"
    assert rest == ["  prompt", "    Add."]
    plain = {"step": 0, "prompt": "Add.", "completion": "3", "reward": 1.0, "advantage": 0.5}
    assert transcript(plain).plain.splitlines()[-2:] == ["  model", "    3"]


def test_a_transcript_is_text_whatever_it_says() -> None:
    evil = "\x1b]0;taken over\x07[bold]\r\x9b2J"
    call = {"function": {"name": evil, "arguments": evil}}
    said = dict.fromkeys(("role", "name", "content"), evil)
    turns = [said | {"role": "assistant", "tool_calls": [call]}, said]
    lost = {"lost": "process", "failure": evil, "retries": 0}
    for episode in ({}, lost):
        row = {"step": 0, "prompt": evil, "completion": turns, "reward": None, "advantage": None, "episode": episode}
        shown = transcript(row).plain
        assert all(one.isprintable() or one == "\n" for one in shown)
        assert "[bold]" in shown, "and no markup of ours"
