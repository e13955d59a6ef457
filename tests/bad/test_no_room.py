"""A full disk, for real: a file system of a few kilobytes under the output, and under TMPDIR."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
import tiny_checkpoints as tiny

#: Mounts a small file system in a namespace of its own, runs the rest, and lists what is left on it.
IN_A_SMALL_FILE_SYSTEM = 'mount -t tmpfs -o size=$1 none "$2" && shift 2 && "$@"; code=$?; find "$ROOM" >&2; exit $code'


def in_small_room(size: str, room: Path, *command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command while `room` is a file system of `size`; what is left on it is at the end of stderr."""
    room.mkdir()
    call = ["unshare", "-rm", "sh", "-c", IN_A_SMALL_FILE_SYSTEM, "sh", size, str(room), *map(str, command)]
    values = {**os.environ, "ROOM": str(room), **environment}
    return subprocess.run(call, capture_output=True, text=True, check=False, env=values)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    probe = tmp_path_factory.mktemp("probe") / "room"
    if in_small_room("4k", probe, "true").returncode != 0:
        pytest.skip("needs user namespaces, to mount a small file system")
    return tiny.clip(tmp_path_factory.mktemp("room") / "clip")


def test_the_output_disk_is_full(clip: Path, tmp_path: Path) -> None:
    """Exit 7 in one line, and not even an empty .onnx is left."""
    room = tmp_path / "room"
    result = in_small_room(
        "200k", room, sys.executable, "-m", "mcpc", "convert", clip, "-o", room / "package", "--verify", "none"
    )
    assert result.returncode == 7, result.stderr
    assert "No space left on device" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1] == str(room)


def test_the_temporary_folder_is_full(clip: Path, tmp_path: Path) -> None:
    """Nothing of a conversion goes to TMPDIR."""
    room = tmp_path / "room"
    command = f'head -c 4096 /dev/zero > "$ROOM/full"; exec {sys.executable} -m mcpc convert "$@" --verify none'
    result = in_small_room("4k", room, "sh", "-c", command, "sh", clip, "-o", tmp_path / "package", TMPDIR=str(room))
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[-2:] == [str(room), str(room / "full")]
