"""Exports reach object storage whole and once, whatever happens on the way; the server is real, and asks who writes."""

import pytest

from grpo_spec.errors import ConfigError
from grpo_workload.storage import upload_queue
from grpo_workload.storage.files import StorageError
from grpo_workload.storage.manifest import FILE_NAME, describe, write_manifest
from grpo_workload.storage.upload_queue import UploadQueue
from support.trainer.object_storage import BUCKET

URL = f"s3://{BUCKET}/math/ns/job/uid"


@pytest.fixture(autouse=True)
def server(storage):
    return storage


def export(folder, step, text):
    made = folder / f"step-{step}"
    made.mkdir(parents=True, exist_ok=True)
    (made / "model.safetensors").write_bytes(text.encode() * 2_000_000)
    (made / "config.json").write_text("{}")
    write_manifest(made, {name: describe(made / name) for name in ("model.safetensors", "config.json")})
    return made


def objects(server, url=URL):
    """Return the content of all objects below a URL, by name."""
    top = server.bucket / url.removeprefix(f"s3://{BUCKET}/")
    return {str(file.relative_to(top)): file.read_bytes() for file in top.rglob("*") if file.is_file()}


def files(*folders):
    return {f"{folder.name}/{file.name}": file.read_bytes() for folder in folders for file in folder.iterdir()}


def go_on():
    return True


def uploaded(server, url=URL):
    return {name: content for name, content in objects(server, url).items() if name != "write-check"}


def test_exports_are_copied_and_a_later_attempt_copies_what_is_missing(server, tmp_path):
    first = export(tmp_path, 2, "two")
    run = UploadQueue(tmp_path, URL)
    second = export(tmp_path, 10, "ten")
    run.add(second.name)
    assert run.finish(go_on)
    assert uploaded(server) == files(first, second)

    stays = server.bucket / "math/ns/job/uid/step-2/config.json"
    stays.write_text("not written again")
    (server.bucket / "math/ns/job/uid/step-10" / FILE_NAME).unlink()  # as where an upload was cut
    (server.bucket / "math/ns/job/uid/step-10/model.safetensors").write_text("half")
    assert UploadQueue(tmp_path, URL).finish(go_on)
    assert uploaded(server) == files(first, second) | {"step-2/config.json": b"not written again"}

    again = export(tmp_path, 10, "other weights of the same step")
    assert UploadQueue(tmp_path, URL).finish(go_on)
    assert uploaded(server)["step-10/model.safetensors"] == (again / "model.safetensors").read_bytes()


def test_an_upload_outlasts_a_storage_that_is_away_and_training_does_not_wait(server, tmp_path, monkeypatch, caplog):
    url = f"s3://{BUCKET}/away"
    run = UploadQueue(tmp_path, url)
    server.stop()
    made = export(tmp_path, 4, "four")
    run.add(made.name)  # returns at once
    monkeypatch.setattr(upload_queue, "TRIES", 1)
    with pytest.raises(StorageError, match=r"uploadTo: step-4 could not be uploaded to s3://.*NETWORK_CONNECTION"):
        run.finish(go_on)
    assert "again in 1 s" in caplog.text
    assert not run.finish(lambda: False), "a job that is stopped does not wait"
    server.start()
    assert run.finish(go_on)
    assert uploaded(server, url) == files(made)


def test_an_upload_that_takes_too_long_is_begun_again(server, tmp_path, monkeypatch, caplog):
    url, made = f"s3://{BUCKET}/slow", export(tmp_path, 4, "four")
    run = UploadQueue(tmp_path, url)
    monkeypatch.setattr(upload_queue, "UPLOAD_SECONDS", 0.0)
    run.turn()
    run.turn()
    assert "step-4: not done within 0 s; again in 1 s" in caplog.text
    monkeypatch.setattr(upload_queue, "UPLOAD_SECONDS", 60.0)
    assert run.finish(go_on)
    assert uploaded(server, url) == files(made)


def test_an_export_that_was_deleted_meanwhile_is_left_out(server, tmp_path, caplog):
    run = UploadQueue(tmp_path, f"s3://{BUCKET}/gone")
    run.add("step-3")
    assert run.finish(go_on)
    assert "step-3 was not uploaded: it went by storage.export.keep" in caplog.text


@pytest.mark.parametrize(
    ("url", "secret", "said"),
    [
        ("s3://absent/math", "secret", "NO_SUCH_BUCKET"),
        (f"s3://{BUCKET}/math", "wrong", "SIGNATURE_DOES_NOT_MATCH"),
    ],
)
def test_a_wrong_bucket_or_secret_is_told_before_training_begins(tmp_path, monkeypatch, url, secret, said):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with pytest.raises(ConfigError, match=rf"^storage\.export\.uploadTo: cannot write to {url}: .*{said}") as refusal:
        UploadQueue(tmp_path, url)
    assert "podTemplate.envFrom a Secret" in str(refusal.value)
