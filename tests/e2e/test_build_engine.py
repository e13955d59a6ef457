"""`mcpc build-engine` on real packages and on ONNX files: checked against the package, and whole or not there."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from mcpc.core.progress import Silent
from mcpc.core.report import Report
from mcpc.errors import BadInputError, UnsupportedError, UsageError, VerificationError
from mcpc.graph import io
from mcpc.package import Package
from mcpc.storage.digests import sha256_of_file
from mcpc.workflows import build_engine as workflow
from mcpc.workflows.build_engine import build_engine
from mcpc.workflows.inspect import inspect
from mcpc.workflows.quantize import quantize

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="needs tensorrt_rtx: mcpc[rtx]"),
]
TARGET = "rtx-sm89"


@pytest.fixture(scope="module")
def engines(llava_package: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """Engines of the example LLaVA in its default precision."""
    output = tmp_path_factory.mktemp("engines") / "llava"
    return output, build_engine(llava_package, output, TARGET, allow_unverified=True)


def sidecars(output: Path) -> dict[str, Any]:
    return {path.name.split(".")[0]: json.loads(path.read_text()) for path in sorted(output.glob("*.engine.json"))}


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "mcpc", "build-engine", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


def test_one_engine_per_component_with_its_sidecar(engines: tuple[Path, Report], llava_package: Path) -> None:
    output, report = engines
    package = Package.open(llava_package)
    names = [component.name for component in package.manifest.components]
    assert sorted(path.name for path in output.iterdir()) == sorted(
        ["engines.json", *(f"{name}.engine" for name in names), *(f"{name}.engine.json" for name in names)]
    )
    assert report.checked == "lowered"
    for name, record in sidecars(output).items():
        engine = output / f"{name}.engine"
        assert record["source"] == {"package_digest": package.digest, "file": f"{name}.onnx"}
        assert (record["engine_sha256"], record["engine_bytes"]) == (sha256_of_file(engine), engine.stat().st_size)
        assert record["target"]["compute_capabilities"] == record["checks"]["read_back"]["chips"] == ["SM89"]
        assert (record["precision"], record["checked"]) == ("bfloat16", "lowered")  # the checkpoint is bfloat16
        assert (
            record["checks"]["executed"]["worst"]["cosine"] >= record["checks"]["executed"]["gate"]["cosine"] == 0.999
        )
        assert len(record["checks"]["executed"]["cases"]) >= 2
        assert all(item["activation_bytes"] > 0 for item in record["memory"]["profiles"])
        assert {tensor["dtype"] for tensor in record["inputs"]} <= {"bfloat16", "int64"}
    index = json.loads((output / "engines.json").read_text())
    assert {item["component"]: item["sha256"] for item in index["engines"]} == {
        name: record["engine_sha256"] for name, record in sidecars(output).items()
    }


def test_profiles_come_from_one_set_of_named_dimensions(engines: tuple[Path, Report]) -> None:
    profile = sidecars(engines[0])["decoder"]["profiles"][0]
    for word in ("min", "opt", "max"):
        batch, sequence, _ = profile["inputs_embeds"][word]
        past = {profile[name][word][2] for name in profile if name.startswith("past.")}
        assert len(past) == 1
        assert profile["attention_mask"][word] == [batch, past.pop() + sequence]


def test_inspect_reads_the_folder(engines: tuple[Path, Report]) -> None:
    data = inspect(engines[0]).data
    assert [engine["component"] for engine in data["engines"]] == ["decoder", "embed", "vision_encoder"]


def test_weights_shrink_with_the_precision(engines: tuple[Path, Report], llava_package: Path, tmp_path: Path) -> None:
    build_engine(
        llava_package, tmp_path / "wide", TARGET, precision="float32", components=["embed"], allow_unverified=True
    )
    build_engine(
        llava_package, tmp_path / "half", TARGET, precision="float16", components=["embed"], allow_unverified=True
    )
    wide, half = sidecars(tmp_path / "wide")["embed"], sidecars(tmp_path / "half")["embed"]
    table = 411 * 256
    assert wide["checks"]["read_back"]["expected"] == {"float32": 4 * table}
    assert half["checks"]["read_back"]["expected"] == {"float16": 2 * table}
    assert wide["memory"]["weights_bytes"] == 4 * table
    assert half["memory"]["weights_bytes"] == 2 * table
    assert wide["checks"]["executed"]["gate"] == {"max_abs": 1e-4}


@pytest.mark.parametrize(("recipe", "packed", "bits"), [("int4", "int4", 4), ("int8", "int8", 8)])
def test_quantized_weights_stay_packed_in_the_plan(
    recipe: str, packed: str, bits: int, llava_package: Path, tmp_path: Path
) -> None:
    quantize(llava_package, tmp_path / "q", recipe, allow_unverified=True, progress=Silent())
    build_engine(tmp_path / "q", tmp_path / "e", TARGET, precision="float16")
    decoder, embed = sidecars(tmp_path / "e")["decoder"], sidecars(tmp_path / "e")["embed"]
    elements = Package.open(tmp_path / "q").manifest.component("decoder").precision.weights[packed]
    (constants,) = decoder["checks"]["read_back"]["constants"]
    assert elements * bits // 8 <= constants[packed] <= 1.05 * elements * bits // 8
    assert sum(constants.values()) <= 1.15 * constants[packed]
    assert embed["checks"]["read_back"]["constants"] == [{"float16": 2 * 411, "int8": 411 * 256}]


def test_clip_for_three_chips(clip_package: Path, tmp_path: Path) -> None:
    report = build_engine(clip_package, tmp_path / "e", "rtx", allow_unverified=True)
    assert report.data["target"]["compute_capabilities"] == ["SM86", "SM89", "SM120"]
    for record in sidecars(tmp_path / "e").values():
        assert record["checks"]["read_back"]["chips"] == ["SM120", "SM86", "SM89"]
        assert record["precision"] == "float32"  # a float32 checkpoint stays float32 unless asked


def test_two_profiles_of_one_engine(llava_package: Path, tmp_path: Path) -> None:
    options = ("decoder.dim:sequence=1,32,64/1,1,1", "decoder.dim:past=0,0,0/1,64,256", "decoder.dim:batch=1,1,1")
    build_engine(llava_package, tmp_path / "e", TARGET, components=["decoder"], profiles=options, allow_unverified=True)
    record = sidecars(tmp_path / "e")["decoder"]
    assert len(record["memory"]["profiles"]) == len(record["checks"]["read_back"]["constants"]) == 2
    assert record["profiles"][1]["attention_mask"]["max"] == [1, 257]


def test_whisper_in_float16(whisper_package: Path, tmp_path: Path) -> None:
    build_engine(whisper_package, tmp_path / "e", TARGET, precision="float16", allow_unverified=True)
    record = sidecars(tmp_path / "e")["decoder"]
    assert record["checks"]["executed"]["worst"]["cosine"] >= 0.999
    assert {tensor["dtype"] for tensor in record["outputs"]} == {"float16"}


# -- bare ONNX files


def bare(path: Path) -> Path:
    """Write y = relu(x @ w) with a dynamic batch."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n", 64]))
    tensor = ir.Tensor(np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32), name="w")
    w = ir.Value(name="w", type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    h = ir.Value(name="h", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n", 64]))
    y = ir.Value(name="y", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n", 64]))
    nodes = [ir.node("MatMul", [x, w], outputs=[h], name="product"), ir.node("Relu", [h], outputs=[y], name="relu")]
    graph = ir.Graph([x], [y], nodes=nodes, initializers=[w], opset_imports={"": 21}, name="bare")
    io.save(ir.Model(graph, ir_version=10), path)
    return path


def test_a_bare_file_with_the_options_that_its_error_names(tmp_path: Path) -> None:
    path = bare(tmp_path / "bare.onnx")
    refused = command(path, "-o", tmp_path / "e", "--target", TARGET)
    assert refused.returncode == 4
    assert "a dynamic dimension without sizes" in refused.stderr
    flag = refused.stderr.partition("--profile '")[2].partition("'")[0]
    assert flag == "bare.dim:n=1,1,4"
    done = command(path, "-o", tmp_path / "e", "--target", TARGET, "--profile", flag)
    assert done.returncode == 0, done.stderr
    assert "checked: lowered, for SM89" in done.stdout
    record = sidecars(tmp_path / "e")["bare"]
    assert record["source"]["onnx_sha256"] == sha256_of_file(path)
    assert record["profiles"] == [{"x": {"min": [1, 64], "opt": [1, 64], "max": [4, 64]}}]


# -- refusals: the right code, one clear line, nothing written


def test_every_unsupported_node_of_every_component_is_listed(llava_package: Path, tmp_path: Path) -> None:
    package = tmp_path / "p"
    shutil.copytree(llava_package, package)
    for name in ("vision_encoder", "decoder"):
        model = io.load(package / f"{name}.onnx")
        node = next(node for node in model.graph if node.op_type == "MatMul")
        node.op_type, node.domain = "FusedMatMul", "com.microsoft"
        model.opset_imports["com.microsoft"] = 1
        io.save(model, package / f"{name}.onnx")
    reseal(package)
    with pytest.raises(UnsupportedError) as caught:
        build_engine(package, tmp_path / "e", TARGET, allow_unverified=True)
    found = [problem.where.partition(":")[0] for problem in caught.value.problems]
    assert found == ["vision_encoder", "decoder"]
    assert all("[FusedMatMul]" in problem.where for problem in caught.value.problems)
    assert not (tmp_path / "e").exists()


def reseal(package: Path) -> None:
    from mcpc.package import PackageWriter

    PackageWriter(package).seal()


def test_a_damaged_package_is_refused(llava_package: Path, tmp_path: Path) -> None:
    package = tmp_path / "p"
    shutil.copytree(llava_package, package)
    weights = next((package / "weights").iterdir())
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    with pytest.raises(BadInputError, match="damaged"):
        build_engine(package, tmp_path / "e", TARGET, allow_unverified=True)
    assert not (tmp_path / "e").exists()


def test_an_unverified_package_is_refused(llava_package: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unverified"):
        build_engine(llava_package, tmp_path / "e", TARGET)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"components": ["head"]}, "no such component"),
        ({"profiles": ["head.dim:batch=1,1,1"]}, "names no component"),
        (
            {"profiles": ["decoder.attention_mask=1x1,1x40,1x320", "dim:sequence=1,8,64", "dim:past=0,8,256"]},
            "does not fit the graph",
        ),
    ],
)
def test_contradictory_options(options: dict[str, list[str]], text: str, llava_package: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=text):
        build_engine(llava_package, tmp_path / "e", TARGET, allow_unverified=True, **options)  # type: ignore[arg-type]
    assert not (tmp_path / "e").exists()


def test_a_lowered_graph_that_computes_something_else_writes_nothing(
    llava_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = workflow.write_lowered

    def damaged(model: ir.Model, folder: Path) -> Path:
        path = write(model, folder)
        weights = folder / "model.safetensors"
        data = bytearray(weights.read_bytes())
        half = len(data) // 2
        data[half:] = bytes(len(data) - half)  # half of the token table
        weights.write_bytes(data)
        return path

    monkeypatch.setattr(workflow, "write_lowered", damaged)
    with pytest.raises(VerificationError, match="differs from its component"):
        build_engine(llava_package, tmp_path / "e", TARGET, components=["embed"], allow_unverified=True)
    assert list(tmp_path.iterdir()) == []


def test_verify_none_says_so(llava_package: Path, tmp_path: Path) -> None:
    report = build_engine(
        llava_package, tmp_path / "e", TARGET, components=["embed"], verify="none", allow_unverified=True
    )
    record = sidecars(tmp_path / "e")["embed"]
    assert (report.checked, record["checked"], record["checks"]) == ("none", "none", {})


def test_a_dry_run_prints_the_plan_and_writes_nothing(llava_package: Path, tmp_path: Path) -> None:
    done = command(llava_package, "-o", tmp_path / "e", "--target", TARGET, "--allow-unverified", "--dry-run", "--json")
    plan = json.loads(done.stdout)["plan"]
    assert [item["component"] for item in plan] == ["vision_encoder", "embed", "decoder"]
    assert not (tmp_path / "e").exists()


def test_an_interrupt_leaves_nothing(llava_package: Path, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "mcpc", "build-engine", llava_package, "-o", tmp_path / "e", "--target", TARGET]
    process = subprocess.Popen([*map(str, line), "--allow-unverified"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (found := list(tmp_path.glob(".e.*/.work/build.log"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found, "the build never began"
    worker = children(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert list(tmp_path.iterdir()) == []
    assert len(worker) == 1
    assert not Path(f"/proc/{worker[0]}").exists()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_second_build_differs_in_no_fact_but_the_digest(llava_package: Path, tmp_path: Path) -> None:
    records = []
    for name in ("a", "another-folder"):
        build_engine(llava_package, tmp_path / name, TARGET, components=["embed"], allow_unverified=True)
        records.append(sidecars(tmp_path / name)["embed"])
    for record in records:
        del record["engine_sha256"]  # TensorRT numbers symbols differently from run to run
    assert records[0] == records[1]
