"""Where checkpoints really lie: a Hugging Face cache, read-only, under a path with spaces and other scripts."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

pytest.importorskip("torch")
import tiny_checkpoints as tiny

from mcpc.checkpoint import Checkpoint
from mcpc.core.progress import Silent
from mcpc.errors import BadInputError
from mcpc.package import Package
from mcpc.workflows.convert import convert


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a cache's repository folder: `snapshots/<commit>/<name>` are links into `blobs/`, nothing is writable."""
    written = tiny.clip(tmp_path / "written")
    tiny.shard(written)
    repository = tmp_path / "my cache, кэш, 缓存" / "models--mine--clip tiny"
    snapshot = repository / "snapshots" / "5f1ac2"
    snapshot.mkdir(parents=True)
    blobs = repository / "blobs"
    blobs.mkdir()
    for path in written.iterdir():
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(blob)
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / blob.name)
        blob.chmod(0o444)
    for folder in (blobs, snapshot):
        folder.chmod(0o555)
    return repository


def test_converts_and_stays_untouched(repository: Path, tmp_path: Path) -> None:
    """The package holds real files, and not a byte, time or link of the cache changes."""
    before = tiny.state_of(repository)
    assert sum(link for _, _, link in before.values()) > 5
    output = tmp_path / "выход 输出" / "package"
    report = convert(repository / "snapshots" / "5f1ac2", output, progress=Silent())
    assert report.checked == "executed"
    assert not [path for path in output.rglob("*") if path.is_symlink()]
    assert Package.open(output, check_bytes=True).digest == report.data["digest"]
    assert tiny.state_of(repository) == before


def test_the_repository_folder_names_its_snapshot(repository: Path) -> None:
    """The folder above the snapshots is no checkpoint; the hint says which is."""
    with pytest.raises(BadInputError) as caught:
        Checkpoint.open(repository)
    assert caught.value.hint == (
        f"this is a cache folder; pass one of its snapshots: {repository / 'snapshots' / '5f1ac2'}"
    )


def test_an_unfinished_download(repository: Path) -> None:
    """A link whose blob never came is named, with the blob."""
    snapshot = repository / "snapshots" / "5f1ac2"
    link = sorted(snapshot.glob("*.safetensors"))[0]
    blob = link.resolve()
    blob.parent.chmod(0o755)
    blob.rename(blob.with_suffix(".incomplete"))
    with pytest.raises(BadInputError) as caught:
        Checkpoint.open(snapshot)
    assert f"{link.name}: the link leads nowhere: its download never finished" in str(caught.value)
    assert blob.name in str(caught.value)
