"""Tells users' mistakes from trouble that passes, where transformers cannot find, read or make a model."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors import SafetensorError

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import ModelConfig

_SAY_SO = (OSError, ValueError, ImportError, SafetensorError)  # what libraries raise about models by themselves
# The system's errors that stay until somebody changes a path, a right or a file. All others are the storage's.
_STAYS = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.ELOOP}
_STAYS |= {errno.ENAMETOOLONG}


@contextmanager
def explained(model: ModelConfig, what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Within it, raise ConfigError for what libraries say about `model`; trouble that passes stays as it is.

    Args:
        model: the job's section `model`, whose field is named.
        what: words behind "cannot" and before the model's name.
        kinds: errors that can have no other cause there, besides those that say so.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if not isinstance(error, (*_SAY_SO, *kinds)) or passes(error):
            raise
        text = str(error)
        if not isinstance(error, _SAY_SO):
            text = f"{type(error).__name__}: {' '.join(text.split())}; use another model"
        raise ConfigError(f"{model.field}: cannot {what} {model.source}: {text}") from error


def passes(error: BaseException) -> bool:
    """Whether the network, the hub or the storage failed, so that another attempt may go well."""
    chain, cause = [error], error.__cause__ or error.__context__
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    answers = [one.response.status_code for one in chain if isinstance(one, HfHubHTTPError)]
    # A hub that is not asked lacks what the cache lacks, until somebody puts it there.
    not_asked = (OfflineModeIsEnabled, LocalEntryNotFoundError) if constants.HF_HUB_OFFLINE else OfflineModeIsEnabled
    if answers or any(isinstance(one, not_asked) for one in chain):
        return any(status >= 500 or status in (408, 429) for status in answers)
    return any(
        isinstance(one, (ConnectionError, TimeoutError, LocalEntryNotFoundError))
        or type(one).__module__.startswith("http")  # the hub's client, whose package has had several names
        or (isinstance(one, OSError) and one.errno is not None and one.errno not in _STAYS)
        for one in chain
    )
