"""Plans that change the course of a job are made again from a live read; others are not."""

from dataclasses import replace

from grpo_operator.decide.second_look import News, changes_course, news
from grpo_spec.reports import Progress
from support.control_plane.passes import A, all_ready, failed


def test_only_what_ends_or_begins_an_attempt_or_deletes_is_looked_at_again() -> None:
    case, pods = all_ready()
    before = case.status
    assert not changes_course(before, case.see(*pods, at=60, progress=Progress(step=3, total_steps=9)))
    assert news(before, case.status) is News.URGENT, "its first progress"
    assert not changes_course(before, case.see(replace(pods[0], ready=False), *pods[1:], at=70)), "details of pods"
    assert changes_course(before, case.see(failed(A, at=80), *pods[1:], at=80))
