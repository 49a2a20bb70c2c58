"""URLs of object storage have the forms that Arrow reads; tests/trainer uses them with a real server."""

import pytest
from pyarrow.fs import FileSystem
from pydantic import TypeAdapter, ValidationError

from grpo_spec.object_storage import BucketFolder

FOLDER: TypeAdapter[str] = TypeAdapter(BucketFolder)


@pytest.mark.parametrize(
    ("url", "kind"), [("gs://models/math", "gcs"), ("abfs://models@account.dfs.core.windows.net/math", "abfs")]
)
def test_an_accepted_url_names_a_storage_that_arrow_has(url: str, kind: str) -> None:
    storage, folder = FileSystem.from_uri(FOLDER.validate_python(url))
    assert (storage.type_name, folder) == (kind, "models/math")


@pytest.mark.parametrize("url", ["s3://key:secret@models", "gs://models?key=secret", "models/math", "hdfs://a/b"])
def test_a_url_with_a_secret_or_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        FOLDER.validate_python(url)
