"""The meaning of the API server's refusal of a child: the reason, the child that it names, and whether to try again."""

import json

import aiohttp
import pytest
from kopf._cogs.clients.errors import APIForbiddenError, APINotFoundError
from kubernetes.aio.client.exceptions import ApiException

from grpo_operator.runtime.errors import (
    ConflictError,
    EarlyError,
    ForbiddenError,
    RefusedError,
    expected,
    is_early,
    is_forbidden,
    is_temporary,
    refusal,
)
from grpo_spec.reasons import Reason

EARLY = (
    'services "quickstart" is forbidden: cannot set blockOwnerDeletion in this case because cannot find RESTMapping '
    "for APIVersion training.grpo.dev/v1alpha1 Kind GRPOJob: "
    'no matches for kind "GRPOJob" in version "training.grpo.dev/v1alpha1"'
)
QUOTA = 'services "a" is forbidden: exceeded quota: team, requested: services=1, used: services=3, limited: services=3'
LIMITS = 'pods "a" is forbidden: failed quota: team: must specify limits.cpu'
RIGHT = (
    'statefulsets.apps "a" is forbidden: User "system:serviceaccount:grpo-system:grpo-operator" cannot patch resource '
    '"statefulsets" in API group "apps" in the namespace "team"'
)
OWNER = (
    'services "a" is forbidden: cannot set blockOwnerDeletion if an ownerReference refers to a resource you can\'t set '
    "finalizers on"
)
WEBHOOK = 'admission webhook "policy.example.com" denied the request: label cost-center is missing'
TEMPLATE = 'StatefulSet.apps "a" is invalid: spec.template.spec.containers[0].resources: must be less'
ENDING = 'configmaps "a" is forbidden: unable to create new content in namespace team because it is being terminated'


def _error(status: int, message: str) -> ApiException:
    error = ApiException(status=status, reason="r")
    error.body = json.dumps({"message": message})
    return error


@pytest.mark.parametrize(
    ("status", "message", "kind", "reason", "says"),
    [
        (422, TEMPLATE, "StatefulSet", "InvalidPodTemplate", "StatefulSet a, which spec.podTemplate shapes"),
        (400, "strict decoding error", "StatefulSet", "InvalidPodTemplate", "StatefulSet a"),
        (422, 'Service "a" is invalid: metadata.name', "Service", "ChildRefused", "does not admit Service a"),
        (403, QUOTA, "Service", "QuotaExceeded", "Service a does not fit the namespace's quota"),
        (403, LIMITS, "StatefulSet", "QuotaExceeded", "must specify limits.cpu"),
        (403, 'pods "a" is forbidden: violates PodSecurity "restricted"', "StatefulSet", "ChildRefused", "PodSecurity"),
        (400, WEBHOOK, "StatefulSet", "ChildRefused", "cost-center is missing"),
        (403, ENDING, "ConfigMap", "ChildRefused", "is being terminated"),
    ],
)
def test_a_refusal_says_what_it_is(status: int, message: str, kind: str, reason: str, says: str) -> None:
    found = refusal(_error(status, message), kind, "a")
    assert found.reason == reason
    assert says in str(found)
    assert str(found).endswith(message)


@pytest.mark.parametrize(
    ("status", "message"),
    [(409, "the object has been modified"), (500, "etcdserver: leader changed"), (429, "slow down")],
)
def test_a_temporary_error_is_no_refusal(status: int, message: str) -> None:
    assert refusal(_error(status, message), "Service", "a") is None


def test_an_object_that_has_another_form_is_refused_though_the_api_server_answers_500() -> None:
    said = "failed to create typed patch object (ns/a; apps/v1, Kind=StatefulSet): .spec.x: field not declared"
    found = refusal(_error(500, said), "StatefulSet", "a")
    assert found.reason == "InvalidPodTemplate"


def test_a_missing_right_is_told_from_other_refusals() -> None:
    assert is_forbidden(_error(403, RIGHT))
    assert is_forbidden(_error(403, OWNER))
    assert not any(is_forbidden(_error(403, said)) for said in (QUOTA, WEBHOOK, ENDING))
    error = ForbiddenError("apply", "StatefulSet", "/apis/apps/v1/namespaces/team/statefulsets/a", RIGHT)
    assert error.reason == "OperatorForbidden"
    assert str(error).startswith(
        "the operator's ServiceAccount may not apply StatefulSet (/apis/apps/v1/namespaces/team"
    )


def test_only_what_passes_by_itself_is_not_told_on_the_job() -> None:
    passes = [*(ApiException(status=status) for status in (503, 429, None)), ConflictError("changed"), TimeoutError()]
    assert [error for error in (*passes, aiohttp.ServerDisconnectedError()) if not is_temporary(error)] == []
    stays = [ApiException(status=422), EarlyError(), _error(403, QUOTA), KeyError("name")]
    assert [error for error in stays if is_temporary(error)] == []


def test_an_api_server_that_does_not_know_the_owner_yet_is_told_from_missing_rights() -> None:
    assert is_early(_error(403, EARLY))
    assert not any(is_early(_error(403, said)) for said in (RIGHT, OWNER, QUOTA))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (_error(403, WEBHOOK), "grant it the chart's roles"),
        (_error(401, "Unauthorized"), "the API server refuses the operator: Unauthorized"),
        (_error(404, "404 page not found"), "kubectl apply --server-side -f crds/"),
        (_error(429, "storage is (re)initializing"), "busy or not ready (429): storage is (re)initializing"),
        (_error(503, "etcd"), "busy or not ready (503): etcd"),
        (ConnectionRefusedError(111, "Connection refused"), "cannot be reached, or does not answer: Connection"),
        (TimeoutError("no answer"), "no answer"),
        (aiohttp.ServerDisconnectedError(), "cannot be reached"),
        (ForbiddenError("list", "Pod", "/api/v1/pods", RIGHT), "may not list Pod (/api/v1/pods); grant it"),
        (RefusedError(Reason.QUOTA_EXCEEDED, QUOTA), "exceeded quota"),
        (EarlyError(), "there is nothing to do"),
        (APIForbiddenError("grpojobs is forbidden", status=403, headers={}), "grpojobs is forbidden; grant it"),
        (APINotFoundError({"message": "gone"}, status=404, headers={}), "was asked for: gone"),
    ],
)
def test_an_error_that_anybody_expects_says_what_is_missing_in_one_line(error: Exception, says: str) -> None:
    found = expected(error)
    assert says in found.text
    assert "\n" not in found.text


@pytest.mark.parametrize("error", [KeyError("name"), _error(422, TEMPLATE), ValueError("x"), ConflictError("changed")])
def test_a_fault_of_the_operator_is_not_expected(error: Exception) -> None:
    assert expected(error) is None
