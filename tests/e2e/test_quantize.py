"""`mcpc quantize` on real packages and on ONNX files: checked, reproducible, and whole or not there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mcpc.backends.ort import open_model
from mcpc.core.progress import Silent
from mcpc.core.report import Report
from mcpc.errors import BadInputError, UsageError, VerificationError
from mcpc.graph import io
from mcpc.package import Package
from mcpc.passes.quantize import int4
from mcpc.workflows.quantize import quantize
from mcpc.workflows.quantize_steps import Options

FORMS = {"int4": "int4.block", "int8": "int8.channel"}


@pytest.fixture(scope="module", params=["int4", "int8"])
def recipe(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def made(recipe: str, llava_package: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """The example LLaVA, quantized and checked."""
    output = tmp_path_factory.mktemp("quantized") / recipe
    report = quantize(llava_package, output, recipe, allow_unverified=True, progress=Silent())
    return output, report


def fused_ops(path: Path, folder: Path) -> Counter[str]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in ir.load(folder / "optimized.onnx").graph.all_nodes())


@pytest.mark.slow
def test_the_package_is_checked_against_its_parent(made: tuple[Path, Report], recipe: str, llava_package: Path) -> None:
    output, report = made
    package, parent = Package.open(output, allow_unverified=False, check_bytes=True), Package.open(llava_package)
    assert report.checked == package.manifest.verification.checked == "executed"
    assert package.verification["verdict"] == "passed"
    assert package.verification["against"]["digest"] == parent.digest == package.manifest.lineage.parent
    gates = {item["name"]: item["gate"] for item in package.verification["components"]}
    bound = {"int4": 0.99, "int8": 0.999}[recipe]
    assert gates["decoder"] == gates["vision_encoder"] == {"cosine": bound}
    step = package.manifest.lineage.steps[-1]
    assert (step.command, step.options["recipe"]) == ("quantize", f"{recipe}@1.0.0")
    assert {item["pass"] for item in step.passes} >= {"quantize.embedding-int8", f"quantize.linear-{recipe}"}
    assert report.data["package_bytes"]["output"] < 0.55 * report.data["package_bytes"]["parent"]


@pytest.mark.slow
def test_every_quantized_matmul_is_fused_and_every_other_weight_is_listed(
    made: tuple[Path, Report], recipe: str, llava_package: Path, tmp_path: Path
) -> None:
    output, report = made
    decided = {item["weight"]: item for item in report.data["plan"]["weights"]}
    manifest = Package.open(output).manifest
    for component in manifest.components:
        linears = [
            item
            for name, item in decided.items()
            if name.startswith(component.name) and item["pass"].startswith("quantize.linear")
        ]
        ops = fused_ops(output / component.file, tmp_path)
        assert ops["MatMulNBits"] == len(linears)
        assert not ops["DequantizeLinear"]
    expected = {"vision_encoder": 20, "embed": 0, "decoder": 29}
    assert {
        c.name: sum(i["form"].startswith(recipe) for n, i in decided.items() if n.startswith(c.name + "/"))
        for c in manifest.components
    } == expected | {"embed": 1 if recipe == "int8" else 0}
    assert all(item["reason"] for item in decided.values() if not item["pass"])
    floats = {
        f"{component.name}/{value.name}"
        for component in Package.open(llava_package).manifest.components
        for value in io.all_initializers(io.load(llava_package / component.file))
        if value.dtype in (ir.DataType.BFLOAT16, ir.DataType.FLOAT)
        and value.const_value is not None
        and value.const_value.size > 1
    }
    assert floats == set(decided), "no weight is passed over in silence"


@pytest.mark.slow
def test_the_manifest_is_read_from_the_graphs(made: tuple[Path, Report], recipe: str, llava_package: Path) -> None:
    output, _ = made
    manifest, parent = Package.open(output).manifest, Package.open(llava_package).manifest
    decoder = manifest.component("decoder")
    model = io.load(output / decoder.file)
    sources = {item.source_name for item in parent.component("decoder").initializers.values()}
    stored = {
        str(value.name): value.const_value
        for value in io.all_initializers(model)
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    assert stored.keys() <= decoder.initializers.keys()
    assert {item.source_name for item in decoder.initializers.values()} == sources
    head = {name: item for name, item in decoder.initializers.items() if item.source_name.endswith("lm_head.weight")}
    assert {item.transform for item in head.values()} == {FORMS[recipe], FORMS[recipe] + ".scale"}
    assert decoder.initializers["model.language_model.norm.weight"].transform == "cast", "bfloat16 in the parent"
    assert decoder.precision.bytes == sum(tensor.nbytes for tensor in stored.values())
    assert set(decoder.precision.weights) == {"float32", recipe}
    assert manifest.component("embed").functions == ("mcpc::VisionEmbedInt8",)
    assert manifest.kv_cache is not None
    assert manifest.kv_cache.dtype == "float32"
    assert manifest.kv_cache.bytes_per_token == 2 * 4 * 2 * 64 * 4, "keys and values, layers, heads, head size, bytes"
    assert {tensor.dtype for tensor in decoder.outputs} == {"float32"}
    copied = {
        path
        for path in Package.open(llava_package).file_bytes()
        if path.startswith(("processor/", "contracts/", "config"))
    }
    assert copied
    assert copied <= Package.open(output).file_bytes().keys()


@pytest.mark.slow
def test_whispers_tied_table_is_stored_once_and_every_head_is_fused(whisper_package: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    report = quantize(whisper_package, output, "int4", verify="none", allow_unverified=True, progress=Silent())
    forms = {item["weight"]: item["form"] for item in report.data["plan"]["weights"]}
    assert list(forms.values()).count("int8 per row and column, table and head") == 1
    tables = [
        value.const_value
        for value in io.all_initializers(io.load(output / "decoder.onnx"))
        if value.dtype == ir.DataType.INT8
    ]
    spans = {(tensor.offset, tensor.length) for tensor in tables if isinstance(tensor, ir.ExternalTensor)}
    assert (len(tables), spans) == (2, {(next(iter(spans))[0], 51864 * 384)})
    for name in ("encoder", "decoder"):
        ops = fused_ops(output / f"{name}.onnx", tmp_path)
        linears = sum(form.startswith("int4") for weight, form in forms.items() if weight.startswith(name))
        assert ops["MatMulNBits"] == linears + (name == "decoder")
        assert not ops["DequantizeLinear"]


@pytest.mark.slow
def test_the_same_input_gives_the_same_bytes(llava_package: Path, tmp_path: Path) -> None:
    digests = set()
    for seed in ("0", "1"):
        target = tmp_path / f"a folder {seed}"
        command = [sys.executable, "-m", "mcpc", "quantize", str(llava_package), "-o", str(target), "--recipe", "int4"]
        command += ["--verify", "none", "--allow-unverified", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONHASHSEED": seed, "PATH": ""})
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["checked"] == "none"
        digests.add(report["digest"])
        assert Package.open(target, check_bytes=True).digest == report["digest"]
        with pytest.raises(UsageError, match="the package is unverified"):
            Package.open(target, allow_unverified=False)
    assert len(digests) == 1


@pytest.mark.slow
def test_a_quantized_package_is_refused(made: tuple[Path, Report], tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="already quantized") as caught:
        quantize(made[0], tmp_path / "twice", "int8", progress=Silent())
    assert caught.value.exit_code == 3
    assert not (tmp_path / "twice").exists()


def test_what_stops_before_anything_is_written(llava_package: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(UsageError, match="the package is unverified"):
        quantize(llava_package, output, "int4", progress=Silent())
    with pytest.raises(BadInputError, match="no such recipe"):
        quantize(llava_package, output, "int5", allow_unverified=True, progress=Silent())
    with pytest.raises(BadInputError, match="the recipe takes no weight of this package"):
        quantize(
            llava_package, output, "int4", options=Options(keep_wide=("*",)), allow_unverified=True, progress=Silent()
        )
    report = quantize(llava_package, output, "int4", allow_unverified=True, dry_run=True, progress=Silent())
    assert report.checked == ""
    assert len(report.data["plan"]["weights"]) == 97
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_parent_is_refused(llava_package: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(llava_package, copy)
    weights = copy / "weights" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    with pytest.raises(BadInputError, match=r"the package is damaged: weights/model\.safetensors: bytes changed"):
        quantize(copy, tmp_path / "out", "int4", allow_unverified=True, progress=Silent())
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


@pytest.mark.slow
def test_a_missed_gate_writes_nothing_and_says_what_to_keep(
    llava_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int4, "LEVELS", np.float32(1))  # four levels: an INT4 step that is truly too coarse
    arguments = (llava_package, tmp_path / "out", "int4")
    with pytest.raises(VerificationError, match=r"cosine .* is below 0\.99") as caught:
        quantize(*arguments, allow_unverified=True, progress=Silent())
    assert caught.value.exit_code == 5
    assert list(tmp_path.iterdir()) == []
    keep = re.findall(r"--keep-int8 '([^']+)'", caught.value.hint)
    assert "decoder/*" in keep
    kept = Options(keep_int8=tuple(keep))
    report = quantize(*arguments, options=kept, allow_unverified=True, progress=Silent())
    assert report.checked == "executed", "the advice helps"


def float_file(folder: Path, name: str = "model.onnx") -> Path:
    """Write a two-layer graph with weights beside it, in opset 11 form and IR version 6."""
    generator = np.random.default_rng(4)
    model = ir.from_onnx_text(
        """<ir_version: 6, opset_import: ["" : 11]>
        g (float[1,n,64] x, float[64,96] a, float[96] b, float[96,80] c) => (float[n,80] y) {
        s = Squeeze <axes = [0]> (x)
        h = Gemm (s, a, b)
        r = Relu (h)
        y = MatMul (r, c) }"""
    )
    for key, shape in {"a": (64, 96), "b": (96,), "c": (96, 80)}.items():
        value = next(item for item in model.graph.inputs if item.name == key)
        value.const_value = ir.Tensor(generator.standard_normal(shape).astype(np.float32), name=key)
        model.graph.register_initializer(value)  # an input as well, as old exporters write it
    folder.mkdir(exist_ok=True)
    ir.save(model, folder / name, external_data="weights.bin")
    return folder / name


def test_an_onnx_file(recipe: str, tmp_path: Path) -> None:
    source = float_file(tmp_path / "in")
    before = {path.name: path.read_bytes() for path in source.parent.iterdir()}
    report = quantize(source, tmp_path / "out", recipe, progress=Silent())
    assert report.checked == "executed"
    assert report.data["opset"] == {"input": 11, "output": 21}
    assert [item["pass"] for item in report.data["plan"]["weights"]] == [
        f"quantize.linear-{recipe}",
        "",
        f"quantize.linear-{recipe}",
    ]
    assert report.data["verification"]["outputs"]["y"]["cosine"] > {"int4": 0.99, "int8": 0.999}[recipe]
    assert fused_ops(tmp_path / "out" / "model.onnx", tmp_path)["MatMulNBits"] == 2
    assert [value.name for value in io.load(tmp_path / "out" / "model.onnx").graph.inputs] == ["x"]
    x = np.random.default_rng(5).standard_normal((1, 7, 64)).astype(np.float32)
    assert open_model(tmp_path / "out" / "model.onnx").run({"x": x})["y"].shape == (7, 80)
    assert {path.name: path.read_bytes() for path in source.parent.iterdir()} == before
    with pytest.raises(BadInputError, match="already quantized"):
        quantize(tmp_path / "out" / "model.onnx", tmp_path / "twice", recipe, progress=Silent())


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x0a"])
def test_files_that_are_no_graphs(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(content)
    with pytest.raises(BadInputError, match="not an ONNX model"):
        quantize(tmp_path / "bad.onnx", tmp_path / "out", "int8", progress=Silent())
    assert not (tmp_path / "out").exists()


def test_memory_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    peaks = []
    for layers in (4, 16):
        source = _deep_file(tmp_path / str(layers), layers)
        command = [sys.executable, "-m", "mcpc", "quantize", str(source), "-o", str(tmp_path / f"out{layers}")]
        done = subprocess.run(
            [*command, "--recipe", "int4", "--verify", "none", "--json"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        peaks.append(json.loads(done.stdout)["peak_rss_bytes"])
    assert peaks[1] < peaks[0] + 20e6, "twelve layers more are 201 MB of weights more"


def _deep_file(folder: Path, layers: int) -> Path:
    """Write `layers` square layers of 2048 in float32, one tensor in memory at a time."""
    folder.mkdir()
    size = 2048
    lines = [f"x{number + 1} = MatMul (x{number}, w{number})" for number in range(layers)]
    inputs = ", ".join(f"float[{size},{size}] w{number}" for number in range(layers))
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[b,s,{size}] x0, {inputs}) => (float[b,s,{size}] x{layers}) {{ {" ".join(lines)} }}"""
    model = ir.from_onnx_text(text)
    generator = np.random.default_rng(0)
    with (folder / "weights.bin").open("wb") as file:
        for value in model.graph.inputs[1:]:
            offset = file.tell()
            file.write(generator.standard_normal((size, size), np.float32).tobytes())
            value.const_value = ir.ExternalTensor(
                "weights.bin",
                offset,
                file.tell() - offset,
                ir.DataType.FLOAT,
                shape=ir.Shape([size, size]),
                name=str(value.name),
                base_dir=folder,
            )
    for value in list(model.graph.inputs[1:]):
        model.graph.inputs.remove(value)
        model.graph.register_initializer(value)
    io.save(model, folder / "model.onnx")
    return folder / "model.onnx"
