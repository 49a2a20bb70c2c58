"""`grpo diagnose` removes secrets from objects and texts, and keeps what a reader needs."""

import base64

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.commands.redact import REMOVED, is_secret_name, redact, redact_text, secrets_in

TOKEN = "hf_" + "aB3dE5gH7jK9mN1pQ3sT"


SECRETS = "HF_TOKEN WANDB_API_KEY apiKey hfToken AWS_SECRET_ACCESS_KEY db-password Authorization x.credentials"
OTHERS = "pad_token eosToken secretName num_tokens max_tokens tokenizer keep tokens_per_second"


def test_names_of_secrets_and_those_that_only_resemble_them() -> None:
    assert [name for name in f"{SECRETS} {OTHERS}".split() if is_secret_name(name)] == SECRETS.split()


@pytest.mark.parametrize(
    "secret",
    [
        TOKEN,
        "sk-proj-abcdefghijklmnop1234",
        "ghp_abcdefghijklmnopqrstuvwx",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl",
        "https://user:hunter22@example.com/x",
        "Authorization: Bearer abcdef123456",
        "https://bucket/x?X-Amz-Signature=0123456789abcdef",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----",
        'WANDB_API_KEY="0123456789abcdef0123456789abcdef01234567"',
        "password=correct-horse",
    ],
)
def test_what_looks_like_a_secret_is_removed_from_a_text(secret: str) -> None:
    shown = redact_text(f"rank 0: step 3 {secret} and on")

    assert REMOVED in shown
    assert shown.startswith("rank 0: step 3 ")
    assert shown.endswith(" and on")
    parts = ("hunter22", "abcdef123456", "MIIabc", "0123456789abcdef", "correct-horse", TOKEN[4:], "c2lnbmF0")
    assert [part for part in parts if part in shown] == []


def test_what_a_reader_needs_is_kept() -> None:
    text = "step 3: num_tokens=123456 pad_token: <|im_end|> tokens_per_second: 1234.56; "
    text += "pod math-a-0 uid 1b2c-3d4e; token: 123456"

    assert redact_text(text) == text


def test_objects_lose_values_of_variables_and_kubectls_copy_of_the_manifest() -> None:
    reference = {"name": "REF", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": TOKEN, "note": f"see {TOKEN}"}
    volumes = [{"secret": {"secretName": "keys"}}]
    container = {"name": "grpo", "image": "i", "env": [{"name": "PLAIN", "value": "swordfish"}, reference]}
    pod = {
        "kind": "Pod",
        "metadata": {"name": "x", "managedFields": [{"f:env": TOKEN}], "annotations": annotations},
        "spec": {"containers": [container], "volumes": volumes},
    }

    shown = yaml.safe_dump(redact(pod))

    assert "swordfish" not in shown
    assert TOKEN not in shown
    assert "managedFields" not in shown
    assert redact(pod)["spec"]["containers"][0]["env"] == [{"name": "PLAIN", "value": REMOVED}, reference]
    assert redact(pod)["spec"]["volumes"] == volumes
    secret = {"kind": "Secret", "metadata": {"name": "s"}, "data": {"k": base64.b64encode(b"x").decode()}}
    assert redact(secret)["data"] == REMOVED


def test_a_secret_name_at_the_end_of_a_line_does_not_affect_the_next_line() -> None:
    text = "- serviceAccountToken:\n    expirationSeconds: 3607\n    path: token\n"
    assert redact_text(text) == text


@given(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=8, max_size=40), st.text(max_size=40))
def test_the_value_of_a_secret_variable_is_removed_wherever_it_is_printed(secret: str, around: str) -> None:
    pod = {"spec": {"containers": [{"env": [{"name": "MY_TOKEN", "value": secret}]}]}}

    known = set(secrets_in(pod))

    assert known == {secret}
    is_of_the_rest = secret in REMOVED or secret in around + REMOVED + around
    assert is_of_the_rest or secret not in redact_text(f"{around}{secret}{around}", known)
