"""Remove values of variables, and everything that looks like a secret, from objects and texts. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

REMOVED = "[removed]"

_SECRET_WORDS = (
    "password|passwd|passphrase|secret|credential|api[_-]?key|access[_-]?key|private[_-]?key|token|authorization"
)
_SECRET_NAME = re.compile(rf"(?:^|_)(?:{_SECRET_WORDS})s?$")
_TEXT_TOKENS = re.compile(r"(?:^|_)(?:pad|eos|bos|unk|mask|sep|cls|image|stop|new|num|max|min|of|per|by)_tokens?$")
"""Names of tokenizer tokens and of token counts, which are not secret."""
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[-.\s/]+")

_LOOKS_SECRET = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"\bhf_[A-Za-z0-9]{16,}"),  # Hugging Face
    re.compile(r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}"),  # OpenAI and others with its format
    re.compile(r"\b(?:gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,})"),
    re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),  # AWS
    re.compile(r"\bAIza[\w-]{35}"),  # Google
    re.compile(r"\bxox[abeoprs]-[\w-]{10,}"),  # Slack
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),  # JWT, also of service accounts
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),  # user and password of a URL
    re.compile(r"(?i)(?<=\bbearer )[\w.~+/=-]{8,}"),
    re.compile(
        r"(?i)(?<=[?&])(?:x-amz-signature|x-amz-credential|x-goog-signature|sig|signature|token|key)=[^&\s\"']+"
    ),  # signed URLs
)
_SIGN = r"[\"']?[ \t]*[=:][ \t]*[\"']?"
_ASSIGNED = re.compile(
    rf"(?i)(?P<name>[\w-]*(?:{_SECRET_WORDS})s?)(?P<sign>{_SIGN})(?P<value>[^\s\"',;&}}\]\[)]{{6,}})"
)
_NUMBER = re.compile(r"[\d.,eE+-]+")


def is_secret_name(name: str) -> bool:
    """Whether the name of a variable or field means a secret value: HF_TOKEN, apiKey; not pad_token, secretName."""
    words = _WORD.sub("_", name).lower()
    return bool(_SECRET_NAME.search(words)) and not _TEXT_TOKENS.search(words)


def redact_text(text: str, known: Iterable[str] = ()) -> str:
    """Return a text without the `known` secrets and without everything that looks like one."""
    for secret in sorted(known, key=len, reverse=True):
        text = text.replace(secret, REMOVED)
    for pattern in _LOOKS_SECRET:
        text = pattern.sub(REMOVED, text)
    return _ASSIGNED.sub(_assignment, text)


def _assignment(match: re.Match[str]) -> str:
    keeps = not is_secret_name(match["name"]) or _NUMBER.fullmatch(match["value"]) or match["value"] == REMOVED
    return match[0] if keeps else f"{match['name']}{match['sign']}{REMOVED}"


def redact(found: Any, known: Iterable[str] = ()) -> Any:
    """Return an API object without values of variables, managed fields, kubectl's copy of the manifest, and secrets."""
    known = frozenset(known)
    if isinstance(found, Mapping):
        if found.get("kind") == "Secret":
            return {"kind": "Secret", "metadata": {"name": found.get("metadata", {}).get("name")}, "data": REMOVED}
        return {key: _value(str(key), value, known) for key, value in found.items() if key != "managedFields"}
    if isinstance(found, list | tuple):
        return [redact(each, known) for each in found]
    return redact_text(found, known) if isinstance(found, str) else found


def _value(key: str, value: Any, known: frozenset[str]) -> Any:
    if key == "env" and isinstance(value, list):
        return [redact(each, known) | ({"value": REMOVED} if "value" in each else {}) for each in value]
    if key.endswith("last-applied-configuration") or (isinstance(value, str) and is_secret_name(key)):
        return REMOVED
    return redact(value, known)


def secrets_in(found: Any) -> Iterator[str]:
    """Yield values of variables with secret names, to be removed from other files such as logs."""
    if isinstance(found, Mapping):
        for key, value in found.items():
            if key == "env" and isinstance(value, list):
                yield from (
                    each["value"]
                    for each in value
                    if len(each.get("value") or "") >= 6 and is_secret_name(each.get("name", ""))
                )
            else:
                yield from secrets_in(value)
    elif isinstance(found, list | tuple):
        for each in found:
            yield from secrets_in(each)
