"""One thing is no plural."""

from grpo_spec.words import counted, every


def test_one_thing_is_no_plural() -> None:
    assert [counted(number, "pod") for number in (0, 1, 2)] == ["0 pods", "1 pod", "2 pods"]
    assert f"0 of {counted(1, 'pod is', 'pods are')} ready" == "0 of 1 pod is ready"
    assert [every(number, "pod is", "pods are") for number in (1, 2)] == ["the pod is", "all 2 pods are"]
