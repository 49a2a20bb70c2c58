"""A model that cannot be loaded ends the job; a network or a storage that failed does not."""

import errno
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import ModelConfig
from grpo_workload.data.model_errors import explained

CLIENT_ERROR = HfHubHTTPError.__bases__[0]  # of the package by which the hub's client talks HTTP


def from_hub(status):
    """Return what the hub's client raises for an answer with this status."""
    response = SimpleNamespace(headers={}, request=None, status_code=status)
    return HfHubHTTPError(str(status), response=response)


def load(cause):
    """Meet `cause`, which transformers describes in words of its own."""
    with explained(ModelConfig(name="a/b"), "load"):
        try:
            raise cause
        except Exception as error:
            raise OSError("there is no such model") from error


PASSES = [
    OSError(errno.ESTALE, "Stale file handle"),
    OSError(errno.EIO, "Input/output error"),
    CLIENT_ERROR("no answer"),
    LocalEntryNotFoundError("the hub does not answer, and the file is not in the cache"),
    from_hub(503),
    from_hub(429),
]
HAS_TO_BE_MENDED = [
    FileNotFoundError(errno.ENOENT, "No such file"),
    PermissionError(errno.EACCES, "Permission denied"),
    OfflineModeIsEnabled("HF_HUB_OFFLINE is set, and the file is not in the cache"),
    from_hub(404),
    ValueError("no such type of model"),
]


@pytest.mark.parametrize("cause", [*PASSES, *HAS_TO_BE_MENDED])
def test_trouble_that_passes_may_be_tried_again_and_other_trouble_ends_the_job(cause):
    said = (OSError, "^there") if cause in PASSES else (ConfigError, "^model.name: cannot load a/b: there")
    with pytest.raises(said[0], match=f"{said[1]} is no such model$"):
        load(cause)


def test_what_the_cache_lacks_stays_missing_where_no_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError):
        load(LocalEntryNotFoundError("outgoing traffic has been disabled"))
