"""Real builds of small graphs in the child process, read back, and every way in which a build can fail."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
from trt_graphs import FLOAT, linear, model, packed_linear, saved, step, value

from mcpc.backends.trt import build as building
from mcpc.backends.trt.build import Built, build
from mcpc.backends.trt.lowering import lower, open_flat
from mcpc.backends.trt.profiles import Profile
from mcpc.backends.trt.readback import Plan, check_plan, expected_weights, read_io, read_plan
from mcpc.backends.trt.stream import write_lowered
from mcpc.core.tensors import TensorSpec
from mcpc.errors import BackendError, ExitCode, VerificationError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="needs tensorrt_rtx: mcpc[rtx]"
)
PROFILE: Profile = {"x": ((1, 1, 64), (1, 8, 64), (2, 16, 64))}
IN = (TensorSpec("x", "float16", ("batch", "sequence", 64)),)
OUT = (TensorSpec("y", "float16", ("batch", "sequence", 64)),)


def built(path: Path, work: Path, chips: tuple[str, ...] = ("SM89",), timeout_s: float = 300) -> tuple[Built, ir.Model]:
    work.mkdir()
    lowered = lower(open_flat(path), "float16")
    write_lowered(lowered.model, work)
    return build(work, "part", [PROFILE], chips, timeout_s), lowered.model


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, ir.Model]:
    """An INT4 Linear with 4096 x 64 weights."""
    folder = tmp_path_factory.mktemp("packed")
    return built(saved(packed_linear()[0], folder / "m.onnx"), folder / "work")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, ir.Model]:
    """The same Linear with float16 weights."""
    folder = tmp_path_factory.mktemp("plain")
    return built(linear(folder / "m.onnx"), folder / "work")


def problems(made: Built, graph: ir.Model, **changes: object) -> list[str]:
    arguments = {"inputs": IN, "outputs": OUT, "profiles": [PROFILE], "chips": ["SM89"], **changes}
    return [str(problem) for problem in check_plan(read_plan(made.engine), made.report, graph, **arguments)]  # type: ignore[arg-type]


def test_the_plan_is_what_was_asked_for(packed: tuple[Built, ir.Model]) -> None:
    made, graph = packed
    plan = read_plan(made.engine)
    assert plan.chips == {"SM89"}
    assert plan.constants == ({"int4": 2048, "float16": 256},)
    assert expected_weights(graph).fewest == {"int4": 2048, "float16": 256}
    assert problems(made, graph) == []
    assert made.memory[0]["activation"] >= made.memory[0]["scratch"] > 0
    assert made.weights_bytes >= 2048 + 256
    assert (made.tensorrt.split(".")[0], made.plugin_layers, made.peak_rss_bytes > 10**8) == ("1", 0, True)


def test_io_is_read_from_the_finished_engine(packed: tuple[Built, ir.Model]) -> None:
    x, y = read_io(packed[0].report)
    assert (x.name, x.mode, x.dtype, x.shape, x.profiles) == ("x", "input", "float16", (-1, -1, 64), (PROFILE["x"],))
    assert (y.name, y.mode, y.dtype, y.shape) == ("y", "output", "float16", (-1, -1, 64))


def test_a_plan_for_other_chips_is_found(packed: tuple[Built, ir.Model]) -> None:
    assert problems(*packed, chips=["SM86"]) == ["the plan is for other chips (expected SM86, got SM89)"]


def test_other_inputs_and_outputs_are_found(packed: tuple[Built, ir.Model]) -> None:
    wrong = (replace(IN[0], dtype="float32"), TensorSpec("z", "float16", (1,)))
    assert problems(*packed, inputs=wrong) == [
        "z: the plan lacks an input",
        "x: the plan has another dtype (expected float32, got float16)",
    ]
    assert problems(*packed, outputs=()) == ["y: the plan has an output that the graph lacks"]
    other: Profile = {"x": ((1, 1, 64), (1, 8, 64), (2, 17, 64))}
    assert "x: the plan has other profile shapes" in problems(*packed, profiles=[other])[0]


def test_a_quantized_layer_that_appears_as_float_is_found(
    packed: tuple[Built, ir.Model], plain: tuple[Built, ir.Model]
) -> None:
    found = problems(plain[0], packed[1])  # the plan of the float graph where the INT4 graph was meant
    assert found == [
        "weight bytes of the plan in int4, per profile (expected 2048 bytes within 5 %, got 0)",
        "weight bytes of the plan, per profile (expected 2304 bytes within 5 %, got 8200)",
    ]


def test_missing_weights_are_found(plain: tuple[Built, ir.Model]) -> None:
    made, graph = plain
    assert problems(made, graph) == []
    full = read_plan(made.engine)
    weights = full.constants[0]["float16"]
    assert weights == 8192
    half = Plan(full.chips, ({"float16": weights // 2},))
    large = linear_of(made.engine.parent / "large.onnx")
    assert expected_weights(large).fewest == {"float32": 64 * 4096 * 4}
    found = check_plan(half, made.report, large, IN, OUT, [PROFILE], ["SM89"])
    assert [problem.message for problem in found] == ["weight bytes of the plan, per profile"]


def linear_of(path: Path) -> ir.Model:
    return open_flat(linear(path, columns=4096))


def test_a_weight_that_is_widened_at_every_run_is_found(tmp_path: Path) -> None:
    made, graph = built(saved(packed_linear(columns=63)[0], tmp_path / "m.onnx"), tmp_path / "work")
    outputs = (TensorSpec("y", "float16", ("batch", "sequence", 63)),)
    assert any("widens a packed weight" in text for text in problems(made, graph, outputs=outputs))


def test_one_engine_for_three_chips(tmp_path: Path) -> None:
    chips = ("SM86", "SM89", "SM120")
    made, graph = built(saved(packed_linear()[0], tmp_path / "m.onnx"), tmp_path / "work", chips)
    assert problems(made, graph, chips=chips) == []


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.engine"
    path.write_bytes(b"not a plan")
    with pytest.raises(VerificationError, match="not a TensorRT plan"):
        read_plan(path)
    path.write_bytes(b"ptrtd" + bytes(100))
    with pytest.raises(VerificationError, match="names no chip"):
        read_plan(path)


def kept_log(error: BackendError) -> Path:
    return Path(error.hint.rpartition("log: ")[2])


def test_a_parser_refusal_names_the_node_and_keeps_the_log(tmp_path: Path) -> None:
    x = value("x", FLOAT, ["batch", "sequence", 64])
    y = step("Det", [x], "y", shape=["batch"])
    with pytest.raises(BackendError, match="cannot parse the graph") as caught:
        built(saved(model([x], [y]), tmp_path / "m.onnx"), tmp_path / "work")
    assert caught.value.exit_code == ExitCode.BACKEND
    assert "Det" in str(caught.value.problems[0])
    assert "cudaError 35" not in " ".join(map(str, caught.value.problems))
    assert "Det" in kept_log(caught.value).read_text()
    kept_log(caught.value).unlink()


def test_a_refused_profile(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    write_lowered(lower(open_flat(linear(tmp_path / "m.onnx")), "float16").model, work)
    with pytest.raises(BackendError) as caught:
        build(work, "part", [{"x": ((1, 1, 65), (1, 1, 65), (1, 1, 65))}], ["SM89"], 300)
    kept_log(caught.value).unlink()


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def test_a_build_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="took too long") as caught:
        built(linear(tmp_path / "m.onnx"), tmp_path / "work", timeout_s=0.2)
    assert "--timeout" in caught.value.hint
    assert children() == []
    kept_log(caught.value).unlink()


@pytest.fixture
def killer() -> Iterator[None]:
    """Kill the child process of this one with SIGKILL as soon as there is one."""

    def kill() -> None:
        deadline = time.monotonic() + 30
        while not (found := children()) and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in found:
            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    yield
    thread.join()


@pytest.mark.usefixtures("killer")
def test_a_killed_builder_says_out_of_memory(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="most likely out of memory") as caught:
        built(linear(tmp_path / "m.onnx"), tmp_path / "work")
    assert caught.value.got == "SIGKILL"
    kept_log(caught.value).unlink()


def test_a_missing_builder_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(BackendError, match="not installed") as caught:
        building.require_builder()
    assert "mcpc[rtx]" in caught.value.hint
