"""Manifests are read as kubectl reads them, and what is refused is named by document, kind, name and field."""

import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_cli.documents.manifest import InvalidManifest, JobDocument, only_job, read_documents, read_job
from grpo_cli.documents.yaml_values import read_yaml, scalar, write_yaml
from support.control_plane.jobs import spec

HEAD = {"apiVersion": "training.grpo.dev/v1alpha1", "kind": "GRPOJob"}
JOB = HEAD | {"metadata": {"name": "math"}, "spec": spec()}
CLAIM = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: data}\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("2e-5", 2e-5), ("1E3", 1000.0), (".5", 0.5), ("-1.5", -1.5), ("1_000", 1000), ("0x1F", 31)),
        *(("017", 15), ("0o17", 15), ("0b11", 3), ("09", 9.0), ("1:30", "1:30"), ("2001-01-01", "2001-01-01")),
        *(("yes", True), ("Off", False), ("y", True), ("~", None), ("", None), ("null", None), ("nuLL", "nuLL")),
    ],
)
def test_a_text_without_quotes_is_what_kubectl_takes_it_for(text: str, value: Any) -> None:
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


def test_anchors_merges_and_documents_are_those_of_kubectl() -> None:
    text = "# a comment\n---\na: &x {b: 1, c: '2'}\nd: {<<: *x, c: 3}\n---\n\n---\n[on: 5]\n"
    assert read_yaml(text) == [{"a": {"b": 1, "c": "2"}, "d": {"b": 1, "c": 3}}, [{"true": 5}]]
    for wrong, complaint in (
        ("a: 1\n---\nb: [\n", "line 4: "),
        ("--- {a: 1}", "begin a document below the line ---"),
        ("a: &x [*x]", "an anchor contains itself"),
        ("a: !!int x", "x is no !!int"),
    ):
        with pytest.raises(ValueError, match=complaint):
            read_yaml(wrong)


def test_a_job_is_as_it_is_sent() -> None:
    read = read_job(JOB | {"spec": spec(image=None, training={"maxSteps": 5.0, "seed": None})})
    assert read.document == JOB | {"spec": spec(training={"maxSteps": 5})}
    assert read.spec.training.max_steps == 5


@pytest.mark.parametrize(
    ("job", "complaint"),
    [
        ({"metadata": {}}, "metadata.name: Field required"),
        ({"metadata": {"name": 5}}, "metadata.name: Input should be a valid string"),
        ({"metadata": {"name": "math", "lables": {}}}, "metadata.lables: unknown field; did you mean labels?"),
        ({"sepc": {}}, "sepc: unknown field; did you mean spec?"),
        ({"apiVersion": "training.grpo.dev/v1"}, "apiVersion is training.grpo.dev/v1; use training.grpo.dev/v1alpha1"),
        ({"spec": spec(image=float("nan"))}, "spec.image: nan is no number of JSON"),
        ({"spec": spec(training={"max_steps": 5})}, "job math: spec.training.max_steps: unknown field"),
        ({"metadata": {"name": "1math"}}, "job 1math: metadata.name must start with a letter"),
    ],
)
def test_what_is_refused_is_named(job: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        read_job(JOB | job)


def test_all_documents_of_a_file_are_read_in_their_order_and_a_wrong_one_is_named() -> None:
    job = f"---\napiVersion: v1\nkind: List\nitems: [{JOB}]\n".replace("'", '"')
    claim, read = read_documents(CLAIM + job, "job.yaml")
    assert isinstance(claim, dict)
    assert isinstance(read, JobDocument)
    assert only_job([claim, read], "job.yaml") is read
    with pytest.raises(InvalidManifest, match=r"job\.yaml: write exactly one GRPOJob; found: GRPOJob, GRPOJob"):
        only_job([read, read], "job.yaml")
    with pytest.raises(InvalidManifest) as refusal:
        read_documents(CLAIM + job.replace("tiny", "x" * 2000), "job.yaml")
    assert refusal.value.message.startswith("job.yaml: document 2 of 2: job math: spec.model.name: String should have")


@given(st.text(st.characters(codec="utf-8")) | st.from_regex(r"[-+]?[0-9][0-9_.xob]*(e[-+]?[0-9]+)?", fullmatch=True))
@example("1e3")
@example("0o17")
@example("y")
@example("---x\ny")
def test_what_is_written_is_read_as_it_was(text: str) -> None:
    documents = [{"a": text, text: [text]}, [text]]
    assert read_yaml(write_yaml(documents)) == documents


def test_json_is_read_as_json() -> None:
    documents = [{"a": "\N{GRINNING FACE}", "b": 1e3}, {"\tc": [None]}]
    assert read_yaml("\n".join(json.dumps(one, indent="\t") for one in documents)) == documents
    assert read_yaml("{a: NaN, b: yes}\n---\nc: 1\n") == [{"a": "NaN", "b": True}, {"c": 1}]
    assert read_yaml('{"a": NaN}') == [{"a": "NaN"}]


@pytest.mark.parametrize("items", ["5", "{a: 1}", "text"])
def test_items_of_a_list_are_a_list(items: str) -> None:
    with pytest.raises(InvalidManifest, match=r"job\.yaml: items of a List must be a list \(found "):
        read_documents(f"apiVersion: v1\nkind: List\nitems: {items}\n", "job.yaml")
