"""The API server itself checks a GRPOJob: CEL rules, defaults, `kubectl explain`, fields that cannot change."""

import json
import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import yaml

from grpo_cli.documents.manifest import InvalidManifest, only_job, read_documents
from grpo_devcluster import binaries
from grpo_operator.api.crd import crd, whole_schema
from grpo_operator.api.pod_template import MERGE_KEYS
from support.control_plane.mutated_specs import mutated
from support.control_plane.operators import Jobs, make_job
from support.control_plane.refused_by_rules import GYM, RULES, reward
from support.control_plane.refused_episodes import ACCEPTED, REFUSED
from support.paths import EXAMPLES

REWARDS = [{"name": "right", "accuracy": {}}, {"name": "brief", "function": "mine:brief", "weight": 0.5}]
WRITTEN = [
    *(("learningRate", text) for text in ("2e-5", "2E-5", ".5", "1_0e-7", "'2e-5'", "1:30", "+1e-6", "0x1")),
    *(("maxSteps", text) for text in ("5", "5.0", "5e1", "0o17", "017", "0b11", "1_000", "'5'", "09", "5.5")),
    ("maxSteps", "!!int 5"),
    *(("maskTruncatedCompletions", text) for text in ("yes", "On", "TRUE", "1", "'yes'", "y", "~", "!!bool no")),
]
"""Fields of `training`, and how people write their values."""


SECRET = {"everySteps": 1, "uploadTo": "s3://key:secret@models"}
TWICE = {"name": "g", "environments": ["e", "e"]}
BAD = [
    *RULES,
    *REFUSED,
    ({"training": {"numGenerations": 1}}, "spec.training.numGenerations in body should be greater than or equal to 2"),
    ({"training": {"loss": "no_module"}}, "spec.training.loss in body should match"),
    ({"training": {"learningRate": 0}}, "spec.training.learningRate in body should be greater than 0"),
    ({"training": {"learning_rate": 1e-6}}, 'unknown field "spec.training.learning_rate"'),
    ({"rewards": []}, "spec.rewards in body should have at least 1 items"),
    (
        {"podTemplate": {"env": [{"name": "RANK", "value": "7"}]}},
        "spec.podTemplate.env[0]: Invalid value: the operator and the launcher set this variable",
    ),
    ({"trainer": {"groups": [{"name": "a", "gpus": 1}] * 2}}, "spec.trainer.groups[1]: Duplicate value: "),
    ({"trainer": {"groups": [{"name": "a", "gpus": 0}]}}, "gpus in body should be greater than or equal to 1"),
    ({"podTemplate": {"hostPID": True}}, 'unknown field "spec.podTemplate.hostPID"'),
    ({"storage": {"export": SECRET}}, "spec.storage.export.uploadTo in body should match"),
    ({"storage": {"claimName": "a..b"}}, "spec.storage.claimName in body should match"),
    ({"image": "my image:1"}, "spec.image in body should match"),
    ({"device": {"resourceName": "gpu"}}, "spec.device.resourceName in body should match"),
    ({"scheduling": {"topologyKey": "the rack"}}, "spec.scheduling.topologyKey in body should match"),
    ({"generation": {"kvCacheMemory": "0Gi"}}, "spec.generation.kvCacheMemory in body should match"),
    ({"tools": [{"function": "a:f"}] * 2}, "spec.tools[1]: Duplicate value: "),
    ({"environments": [{"name": "e", "factory": "m:E"}] * 2}, "spec.environments[1]: Duplicate value: "),
    ({"environmentPods": {"groups": [TWICE]}}, "spec.environmentPods.groups[0].environments[1]: Duplicate value: "),
]


@pytest.mark.parametrize(("change", "complaint"), BAD)
def test_a_bad_spec_is_refused_with_its_field(jobs: Jobs, change: dict, complaint: str) -> None:
    with pytest.raises(RuntimeError) as refusal:
        jobs.apply(make_job("bad", **change))
    # Kubernetes 1.30 also names the type of what is invalid.
    assert complaint in str(refusal.value).replace('Invalid value: "object": ', "Invalid value: ")


@pytest.mark.parametrize("change", ACCEPTED)
def test_tools_and_environments_are_accepted(jobs: Jobs, change: dict) -> None:
    jobs("create", "--dry-run=server", "-f", "-", stdin=json.dumps(make_job("good", **change)))


def test_kubectl_accepts_the_documents_that_the_command_line_accepts(jobs: Jobs, kubeconfig: Path) -> None:
    """Mutated specs, and numbers and words of YAML; all in one call, without storing any."""
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    random, documents = Random(0), []
    for number in range(120):
        base = make_job(f"mutated-{number}", training={"maxSteps": 5, "learningRate": 1e-5}, rewards=REWARDS)
        spec = mutated(base["spec"], schema, random.choice)
        documents.append(json.dumps(base | {"spec": spec}))
    for number, (field, text) in enumerate(WRITTEN):
        job = yaml.safe_dump(make_job(f"written-{number}", training={field: "PLACE"}))
        documents.append(job.replace("PLACE", text))
    ours = {}
    for document in documents:
        with suppress(InvalidManifest):
            read = only_job(read_documents(document, "file"), "file")
            ours[read.name] = read.document["spec"].get("training", {})

    def apply(documents: Iterable[str], *args: str) -> subprocess.CompletedProcess[str]:
        command = [binaries.binary("kubectl"), f"--kubeconfig={kubeconfig}", "apply", "--dry-run=server", *args, "-f-"]
        return subprocess.run(command, input="\n---\n".join(documents), capture_output=True, text=True, timeout=60)

    done = apply(documents)
    theirs = set(re.findall(r"grpo.dev/(\S+) created", done.stdout))
    assert ours.keys() == theirs, done.stderr
    assert 30 < len(theirs) < len(documents) - 30
    read_by_them = json.loads(apply((one for one in documents if _name(one) in theirs), "--output=json").stdout)
    assert ours == {one["metadata"]["name"]: one["spec"]["training"] for one in read_by_them["items"]}


def _name(document: str) -> str:
    return str(yaml.safe_load(document)["metadata"]["name"])


def test_all_examples_are_accepted_with_what_they_bring(jobs: Jobs) -> None:
    said = jobs("create", "--dry-run=server", "--recursive", "-f", str(EXAMPLES))
    assert said.count("grpojob.training.grpo.dev/") == len([*EXAMPLES.rglob("*.yaml")])


def test_one_refusal_names_all_rules_that_a_section_breaks(jobs: Jobs) -> None:
    training = {"klInReward": True, "warmupSteps": 5, "lrSchedulerType": "constant"}
    with pytest.raises(RuntimeError) as refusal:
        jobs.apply(make_job("bad", training=training, lora={"push": "adapters"}))
    assert str(refusal.value).count("spec.training: ") == 1
    for complaint in ("klInReward needs beta over 0", "constant has no warm-up", "lora.push adapters needs"):
        assert complaint in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("1job", "metadata.name must start with a letter"),
        ("j" * 51, "the name of the group a must have at most 51 characters together"),
        ("j" * 32, f"the name of the group {'e' * 20} must have at most 51 characters together"),
    ],
)
def test_a_bad_name_is_refused(jobs: Jobs, name: str, complaint: str) -> None:
    engines = {"topology": "Server", "server": {"groups": [{"name": "g", "gpus": 1}, {"name": "e" * 20, "gpus": 1}]}}
    with pytest.raises(RuntimeError, match=complaint):
        jobs.apply(make_job(name, generation=engines))


def test_a_spec_is_stored_as_written_its_defaults_are_in_the_status_and_every_field_is_explained(jobs: Jobs) -> None:
    written = make_job("defaults", evaluation=GYM | {"rewards": [{"name": "r", "accuracy": {}}]})
    jobs.apply(written)
    jobs.wait_for("defaults", "Accepted", "True")
    stored = jobs.get("grpo", "defaults")
    for group in stored["spec"]["trainer"]["groups"]:
        assert group.pop("podTemplate") == {}
    assert {name: value for name, value in stored["spec"].items() if value != {}} == written["spec"]
    defaults = stored["status"]["defaults"]
    assert (defaults["training"]["lossType"], defaults["generation"]["topology"]) == ("dapo", "Colocate")
    rewards = {"weight": 1, "accuracy": {}, "memoryLimit": "8Gi", "timeoutSeconds": 300}
    assert defaults["evaluation"]["rewards"] == rewards
    shown = " ".join(jobs("explain", "grpojob.spec.training.numGenerations").split())
    assert "completions sampled for each prompt (GRPO's group). Default: 8." in shown


CORE_KINDS = ("SecurityContext", "Container", "PodSpec")


def test_fields_of_pod_templates_and_keys_of_their_lists_are_those_of_a_pod(jobs: Jobs) -> None:
    schemas = json.loads(jobs("get", "--raw", "/openapi/v3/api/v1"))["components"]["schemas"]
    core = "io.k8s.api.core.v1"
    kinds = ("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta", *(f"{core}.{kind}" for kind in CORE_KINDS))
    theirs = {name: field for kind in kinds for name, field in schemas[kind]["properties"].items()}
    ours = whole_schema()["properties"]["spec"]["properties"]["podTemplate"]["properties"]
    types = {name: theirs[name].get("type", "object") for name in ours}
    assert {name: field["type"] for name, field in ours.items()} == types
    keys = {name: theirs[name].get("x-kubernetes-patch-merge-key") for name in ours}
    assert {name: key for name, key in keys.items() if key} == MERGE_KEYS


def test_a_section_has_one_owner_and_what_it_leaves_out_is_not_set(jobs: Jobs) -> None:
    job = make_job("owned", managedBy="example.com/nobody")
    arguments = ("apply", "--server-side", "--field-manager=somebody", "-f", "-")
    for learning in ({"learningRate": 0.5}, {}):
        changed = job | {"spec": job["spec"] | {"training": {"maxSteps": 7} | learning}}
        jobs(*arguments, stdin=json.dumps(changed))
        training = jobs.get("grpo", "owned")["spec"]["training"]
        assert training == {"maxSteps": 7} | learning
    stored = json.loads(jobs("get", "grpo", "owned", "-o", "json", "--show-managed-fields"))
    (owner,) = stored["metadata"]["managedFields"]
    assert owner["fieldsV1"]["f:spec"]["f:training"] == {}


def test_spec_is_free_until_the_job_has_started_and_frozen_after(jobs: Jobs) -> None:
    jobs.apply(make_job("frozen", claim="later"))
    jobs.wait_for("frozen", "Accepted", "False", "ClaimNotFound")
    jobs.apply(make_job("frozen", storage={"claimName": None}))
    jobs.wait_for("frozen", "Accepted", "True")

    labelled = {"podTemplate": {"labels": {"team": "research"}}}
    frozen: list[tuple[dict, str]] = [
        ({"training": {"maxSteps": 7}}, ": training.maxSteps cannot change once the job has started; create another"),
        (
            {"dataset": {"reasoningGym": {"size": 3}}, "storage": {"export": {"everySteps": 5}}} | reward(stopped={}),
            ": dataset.reasoningGym.size rewards storage.export cannot change once",
        ),
        (labelled, ": podTemplate.labels can change only while the job is suspended; set suspend"),
        ({"generation": {"maxModelLen": 2048}}, ": generation.maxModelLen can change only while the job is suspended"),
        ({"scheduling": {"gang": "Native"}}, ": scheduling.gang can change only while the job is suspended"),
        ({"managedBy": "kueue.x-k8s.io/multikueue"}, "managedBy cannot change"),
        ({"lora": {"r": 8}}, ": lora cannot change once the job has started"),
        (
            {"failurePolicy": {"onGenerationFailure": "RestartGeneration"}},
            "can change to or from RestartGeneration only while the job is suspended",
        ),
    ]
    for change, complaint in frozen:
        with pytest.raises(RuntimeError, match=re.escape(complaint)):
            jobs.edit("frozen", **change)
    beside = '{"spec": {"training": {"maxSteps": 7}}, "status": {"phase": "Other"}}'
    with pytest.raises(RuntimeError, match="cannot change once the job has started"):  # a status beside it is ignored
        jobs("patch", "grpo", "frozen", "--type=merge", "-p", beside)
    policy = {"maxRestarts": 9, "onGenerationFailure": "Fail"}
    jobs.edit("frozen", failurePolicy=policy, activeDeadlineSeconds=3600, ttlSecondsAfterFinished=60)
    jobs.edit("frozen", scheduling={"timeoutSeconds": 60}, suspend=True)
    jobs.wait_for("frozen", "Suspended", "True")
    jobs.edit("frozen", **labelled)
    jobs("label", "grpo", "frozen", "team=research")
