"""Checksums of files, also of those that threads read in parts."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.storage import manifest
from grpo_workload.storage.manifest import Entry, describe, faults, joined


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_checksums_give_that_of_both_texts(first: bytes, second: bytes) -> None:
    assert joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize("size", [0, 1, 64, 65, 1000])
@pytest.mark.parametrize("threads", [1, 3])
def test_parts_of_a_file_give_the_checksum_of_the_whole(
    size: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "PART_BYTES", 64)
    monkeypatch.setattr(manifest, "_CHUNK", 16)
    content = bytes(range(256)) * 4
    (tmp_path / "file").write_bytes(content[:size])
    assert describe(tmp_path / "file", threads) == Entry(size, zlib.crc32(content[:size]))


def test_a_part_that_changes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "PART_BYTES", 64)
    (tmp_path / "file").write_bytes(content := bytes(1000))
    entries = {"file": describe(tmp_path / "file")}
    assert faults(tmp_path, entries, ["file"]) == []
    (tmp_path / "file").write_bytes(content[:500] + b"x" + content[501:])
    assert faults(tmp_path, entries, ["file"]) == ["file: its content has changed (CRC-32)"]
