"""A container that ends before any program of ours runs: only an image that surely lacks them ends the job at once."""

import pytest

from grpo_operator.api.times import rfc3339
from grpo_operator.decide.observed_pod import ObservedPod
from support.control_plane.jobs import NOW, pod, pod_as_read
from support.control_plane.passes import A, B, Case

LACKS_PACKAGE = """banner of the image
/opt/venv/bin/python: Error while finding module specification for 'grpo_workload.trainer_pod' \
(ModuleNotFoundError: No module named 'grpo_workload')
"""
LACKS_PYTHON = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: "
    'unable to start container process: error during container init: exec: "python": executable file not found in $PATH'
)


@pytest.mark.parametrize(
    ("code", "reason", "said"),
    [
        (1, "Error", LACKS_PACKAGE),
        (1, "Error", "python: No module named grpo_workload.trainer_pod"),
        (128, "StartError", f"{LACKS_PYTHON}: unknown"),
        (127, "ContainerCannotRun", LACKS_PYTHON),
    ],
)
def test_an_image_without_the_workload_ends_the_job_at_once_and_says_what_to_use(
    code: int, reason: str, said: str
) -> None:
    case = Case()
    case.see(pod(A), _exited(B, code, reason, said))
    assert (case.status.phase, case.status.summary.reason, case.status.restarts.total) == ("Failed", "ConfigError", 0)
    assert case.status.summary.message == (
        f"trainer pod {B} on node node, exit code {code}: spec.image does not hold the programs of this release: use a "
        "workload image of the operator's release, or one made FROM it (docs/custom-image.md) (more in "
        "status.lastFailure); a restart would fail on the same settings"
    )
    assert said.strip() in case.status.last_failure.message


@pytest.mark.parametrize(
    ("code", "reason", "said"),
    [
        (1, "Error", "ModuleNotFoundError: No module named 'grpo_workload_extras'"),
        (1, "Error", f"{LACKS_PACKAGE}another line"),
        (1, "Error", "ModuleNotFoundError: No module named 'torch'"),
        (137, "OOMKilled", LACKS_PACKAGE),
        (128, "StartError", "error mounting /dev/nvidia0: no such file or directory: unknown"),
        (1, "Error", LACKS_PYTHON),
    ],
)
def test_a_container_that_ends_in_another_way_before_it_says_anything_is_tried_again(
    code: int, reason: str, said: str
) -> None:
    case = Case()
    case.see(pod(A), _exited(B, code, reason, said))
    assert (case.status.phase, case.status.last_failure.reason) == ("Restarting", reason)


def test_a_name_that_is_none_of_an_image_ends_the_job_at_once_and_an_image_that_is_not_there_does_not() -> None:
    for reason, phase in (("ErrImagePull", "Starting"), ("InvalidImageName", "Failed")):
        case, state = Case(), {"waiting": {"reason": reason, "message": "couldn't parse image name"}}
        case.see(pod_as_read(A, {"state": state}), pod(B))
        assert case.status.phase == phase
    why = "spec.image: couldn't parse image name; a restart would fail on the same settings"
    assert case.status.summary.message == f"trainer pod {A} on node node: {why}"


@pytest.mark.parametrize(
    ("code", "reason", "said", "first"),
    [
        (137, "OOMKilled", "step 3", "it exceeded its memory limit: raise podTemplate.resources.limits.memory"),
        (1, "Error", "Traceback:\n  File\nImportError: no torch\n", "ImportError: no torch"),
        (1, "Error", "boom\n", "boom"),
        (1, "Error", "\n", "it ended without a result and without a log"),
        (
            0,
            "Completed",
            "",
            "the container exited 0 but wrote no result: is spec.image a workload image of grpo-operator?",
        ),
    ],
)
def test_the_first_line_about_a_container_that_left_no_result_says_most(
    code: int, reason: str, said: str, first: str
) -> None:
    ending = _exited(A, code, reason, said).outcome
    assert ending.message.splitlines()[0] == first
    assert said.strip() in ending.message


def _exited(name: str, code: int, reason: str, said: str) -> ObservedPod:
    """Return a pod whose container has ended without a result of ours, and waits to be started again."""
    ended = {"exitCode": code, "reason": reason, "message": said, "finishedAt": rfc3339(NOW)}
    waits = {"waiting": {"reason": "CrashLoopBackOff"}}
    return pod_as_read(name, {"restartCount": 1, "state": waits, "lastState": {"terminated": ended}})
