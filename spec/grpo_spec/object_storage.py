"""Shared by the parts that use object storage. Torch-free."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

BucketFolder = Annotated[str, Field(max_length=512, pattern=r"^(s3|gs|abfss?)://[^/:?#\s]+(/[^:?#\s]*)?$")]
"""URL in object storage, without credentials and options: those would be seen by everybody who reads the job."""

CREDENTIALS = "Credentials come from the environment of trainer pods (podTemplate.envFrom a Secret)"

REFUSED = re.compile(
    "ACCESS_DENIED|NO_SUCH_BUCKET|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|UNRECOGNIZED_CLIENT|"
    "Bucket '.*' not found|PERMISSION_DENIED|NOT_FOUND|UNAUTHENTICATED|AuthorizationFailure|AuthenticationFailed"
)
"""Answers of storages about names and credentials; trying again does not help."""
