"""Which errors of the API server are a permanent refusal of the object that was sent."""

import json

import pytest
from kubernetes.aio.client.exceptions import ApiException

from grpo_operator.edge.errors import is_refusal

EARLY = (
    'services "quickstart" is forbidden: cannot set blockOwnerDeletion in this case because cannot find RESTMapping '
    "for APIVersion training.grpo.dev/v1alpha1 Kind GRPOJob: "
    'no matches for kind "GRPOJob" in version "training.grpo.dev/v1alpha1"'
)


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (422, 'StatefulSet.apps "a" is invalid: spec.template.spec.containers[0].resources: must be less', True),
        (403, 'pods "a" is forbidden: violates PodSecurity "restricted:latest"', True),
        (400, "strict decoding error", True),
        (403, EARLY, False),
        (409, "the object has been modified", False),
        (500, "etcdserver: leader changed", False),
    ],
)
def test_a_temporary_error_is_no_refusal(status: int, message: str, expected: bool) -> None:
    error = ApiException(status=status, reason="r")
    error.body = json.dumps({"message": message})
    assert is_refusal(error) is expected
