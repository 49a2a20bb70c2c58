"""Requests that the gateway refuses."""

from __future__ import annotations

CONTEXT_LENGTH = "context_length_exceeded"
EPISODE_TIMEOUT = "episode_timeout"
OVER = (CONTEXT_LENGTH, EPISODE_TIMEOUT)
"""Codes that say that the episode has no room or time for another turn: the policy's own doing."""


class RefusalError(Exception):
    """A request that gets no answer; the program reads why."""

    def __init__(self, message: str, *, code: str, param: str | None = None, status: int = 400) -> None:
        """`code`: for programs, as OpenAI's; `param`: the part of the request that is meant."""
        super().__init__(message)
        self.code, self.param, self.status = code, param, status

    def body(self) -> dict[str, object]:
        """Return it as OpenAI's API writes errors."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def no_prefill(place: int) -> RefusalError:
    """Refuse a turn that the program has begun."""
    text = f"messages[{place}], the last one, is the model's: it begins its own turns"
    return RefusalError(text, code="invalid_value", param=f"messages[{place}]")


def template(error: Exception) -> RefusalError:
    """Refuse what the chat template refuses."""
    return RefusalError(
        f"the model's chat template refuses the messages: {error}", code="invalid_value", param="messages"
    )


def too_long(what: str, most: int) -> RefusalError:
    """Refuse what leaves no room for a turn."""
    text = f"{what} training.maxCompletionLength leaves {most}: the maximum context length is exceeded"
    return RefusalError(text, code=CONTEXT_LENGTH, param="messages")
