"""Conversion of real checkpoints: same bytes everywhere, every size, every stored dtype."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from mcpc.core.progress import Silent
from mcpc.package import Package
from mcpc.storage.safetensors import read_header
from mcpc.workflows.convert import convert

_CONVERT = """
import sys
from pathlib import Path
from mcpc.core.progress import Silent
from mcpc.workflows.convert import convert
convert(Path(sys.argv[1]), Path(sys.argv[2]), verify=sys.argv[3], progress=Silent())
"""


def in_process(checkpoint: Path, output: Path, seed: str, verify: str) -> None:
    """Convert in a fresh process with its own hash seed."""
    subprocess.run(
        [sys.executable, "-c", _CONVERT, str(checkpoint), str(output), verify],
        check=True, env=os.environ | {"PYTHONHASHSEED": seed},
    )  # fmt: skip


def test_same_input_same_bytes(fashion_clip: Path, tmp_path: Path) -> None:
    """Two folders, two hash seeds, verification included: one digest, and no absolute path inside."""
    copy = tmp_path / "a folder with spaces" / "модель"
    shutil.copytree(fashion_clip, copy)
    outputs = (tmp_path / "one" / "package", tmp_path / "zwei" / "noch tiefer" / "package")
    for source, output, seed in zip((fashion_clip, copy), outputs, ("1", "77"), strict=True):
        in_process(source, output, seed, "full")
    first, second = (Package.open(output, check_bytes=True) for output in outputs)
    assert first.digest == second.digest
    assert first.manifest.verification.checked == "executed"
    for relative in first.file_bytes():
        data = (first.root / relative).read_bytes()
        for path in (str(tmp_path), str(Path(sys.prefix)), str(Path.home())):
            assert path.encode() not in data, relative


def test_verification_is_recorded(fashion_clip: Path, tmp_path: Path) -> None:
    """verification.json says against what, on what, with which gates; report.json holds the exact figures."""
    report = convert(fashion_clip, tmp_path / "package", progress=Silent())
    package = Package.open(tmp_path / "package")
    assert report.checked == package.verification["checked"] == "executed"
    assert package.verification["against"] == {"kind": "checkpoint", "digest": package.manifest.model.source.digest}
    for component in package.verification["components"]:
        assert component["gate"] == {"max_abs": 1e-4}
        assert len([case for case in component["cases"] if case.startswith("seeded")]) == 3
        assert any("images x" in case for case in component["cases"])
    figures = json.loads((package.root / "report.json").read_text())["verification"]
    assert figures["chain"]["cross_modal"]["kl_divergence"] < 1e-6
    assert figures["chain"]["cross_modal"]["cosine_gap"] < 1e-5


def test_stored_bytes_are_the_checkpoints(llava_package: Path, fashion_llava: Path) -> None:
    """`--dtype keep` copies: the weight file is the checkpoint's file, and every graph points into it."""
    source = (fashion_llava / "model.safetensors").read_bytes()
    assert (llava_package / "weights" / "model.safetensors").read_bytes() == source
    manifest = Package.open(llava_package).manifest
    assert {dtype for component in manifest.components for dtype in component.precision.weights} == {"bfloat16"}
    assert all(tensor.dtype in ("float32", "int64") for c in manifest.components for tensor in (*c.inputs, *c.outputs))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_stored_dtype(fashion_clip: Path, tmp_path: Path, dtype: str) -> None:
    """Each dtype is stored as asked and widens to the value that a cast gives."""
    import ml_dtypes

    convert(fashion_clip, tmp_path / "package", dtype=dtype, verify="none", progress=Silent())
    kinds = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    stored = read_header(tmp_path / "package" / "weights" / "model.safetensors")
    for name, entry in read_header(fashion_clip / "model.safetensors").items():
        assert stored[name].dtype == dtype
        np.testing.assert_array_equal(stored[name].read(), entry.read().astype(kinds[dtype]), strict=True)


def test_onnxruntime_alone_runs_it(llava_package: Path) -> None:
    """A user without mcpc: plain ONNX Runtime loads every graph, at sizes that differ from the traced ones."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(
        str(llava_package / "vision_encoder.onnx"), options, providers=["CPUExecutionProvider"]
    )
    for images in (1, 3, 5):
        pixels = np.random.default_rng(0).standard_normal((images, 3, 32, 32)).astype(np.float32)
        (features,) = session.run(None, {"pixel_values": pixels})
        assert features.shape == (16 * images, 256)
        assert np.isfinite(features).all()
    embed = ort.InferenceSession(str(llava_package / "embed.onnx"), options, providers=["CPUExecutionProvider"])
    ids = np.array([[1, 4, 9]])
    (rows,) = embed.run(None, {"input_ids": ids, "image_features": np.zeros((0, 256), np.float32)})
    assert rows.shape == (1, 3, 256)
    (with_image,) = embed.run(None, {"input_ids": ids, "image_features": np.full((1, 256), 7, np.float32)})
    assert (with_image[0, 1] == 7).all()
    np.testing.assert_array_equal(with_image[0, [0, 2]], rows[0, [0, 2]])


def test_numbers_come_from_the_model(llava_package: Path) -> None:
    """What the manifest says equals what the checkpoint's config says, by another way."""
    manifest = Package.open(llava_package).manifest
    assert manifest.modalities["image"].rows_per_item == (32 // 8) ** 2
    assert manifest.modalities["text"].vocabulary == 411
    assert manifest.kv_cache is not None
    assert (manifest.kv_cache.layers, manifest.kv_cache.kv_heads, manifest.kv_cache.head_dim) == (4, 2, 64)
    assert manifest.kv_cache.bytes_per_token == 4 * 2 * 2 * 64 * 4
    assert manifest.vision_encoder_ref == "schema://clip-vit@v1.2.0"
    contract = json.loads((llava_package / "contracts" / "clip-vit@v1.2.0.json").read_text())
    assert contract["num_layers"] == 4
    assert contract["patch_size"] == 8
    assert len(manifest.unused) == 18


def test_whisper_cross_attention_is_computed_once(whisper_package: Path) -> None:
    """The decoder projects no audio: its graph has no weight of a cross-attention key or value projection."""
    manifest = Package.open(whisper_package).manifest
    decoder, encoder = manifest.component("decoder"), manifest.component("encoder")
    assert not [name for name in decoder.initializers if "encoder_attn.k_proj" in name or "encoder_attn.v_proj" in name]
    assert [name for name in encoder.initializers if "encoder_attn.v_proj" in name]
    assert [t.name for t in encoder.outputs if t.name.startswith("cross.")] == [
        t.name for t in decoder.inputs if t.name.startswith("cross.")
    ]
