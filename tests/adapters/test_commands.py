"""Adapters through the commands: exit codes, dtypes, streamed verification, and `verify --adapter`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("peft")
import transformers as hf
from lora_models import QV, tiny, torch, train

from mcpc.checkpoint import Checkpoint
from mcpc.checkpoint.adapters import Adapter
from mcpc.cli.app import main
from mcpc.core.progress import Silent
from mcpc.core.runner import Array
from mcpc.errors import UsageError
from mcpc.export.convert import Exporter
from mcpc.export.state import float32_tensor
from mcpc.graph.weights import refer_to_weights
from mcpc.package import Package, package_writer
from mcpc.storage.safetensors import read_header
from mcpc.workflows.compile import compile_recipe
from mcpc.workflows.convert import convert
from mcpc.workflows.verify import verify

CLIP = "CLIPModel"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP in bfloat16."""
    root = tiny.clip(tmp_path_factory.mktemp("clip") / "clip")
    hf.CLIPModel.from_pretrained(root, dtype=torch.bfloat16).save_pretrained(root)
    return root


@pytest.fixture(scope="module")
def adapter(clip: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("adapter") / "style", clip, CLIP, target_modules=QV)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["mcpc", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


EXITS: dict[str, tuple[int, Callable[[Path], object], str]] = {
    "a word as weight": (2, lambda root: f"{root}=much", "the weight of an adapter is a number"),
    "weight 0": (2, lambda root: f"{root}=0", "a number other than 0"),
    "no folder": (3, lambda root: root / "gone", "no such adapter folder"),
    "another rank": (3, lambda root: _edited(root, r=9), "another rank than the config says"),
    "another method": (4, lambda root: _edited(root, peft_type="IA3"), "not LoRA"),
}


def _edited(root: Path, **fields: object) -> Path:
    tiny.edit_json(root / "adapter_config.json", **fields)
    return root


@pytest.mark.parametrize("kind", EXITS)
def test_exit_codes(
    kind: str, clip: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    code, option, text = EXITS[kind]
    root = tmp_path / "style"
    shutil.copytree(adapter, root)
    output = tmp_path / "package"
    assert run(monkeypatch, "convert", clip, "-o", output, "--adapter", option(root)) == code
    assert text in " ".join(capsys.readouterr().err.split())
    assert not output.exists()


def merged_values(clip: Path, adapter: Path, dtype: str) -> dict[str, Array]:
    """Return {parameter: merged weight in float32, before the package's dtype}."""
    checkpoint = Exporter(Checkpoint.open(clip), [Adapter.open(adapter)], dtype).checkpoint
    return {name: float32_tensor(checkpoint, made).numpy() for name, made in checkpoint.merged.items()}


def stored(package: Path) -> dict[str, Array]:
    return {
        name.partition(" = ")[0]: entry.read()
        for name, entry in read_header(package / "weights" / "made.safetensors").items()
    }


@pytest.mark.sweep
def test_rounded_once(clip: Path, adapter: Path, tmp_path: Path) -> None:
    """In float32 nothing is rounded, in float16 once from float32, kept: once to the checkpoint's bfloat16."""
    wide = merged_values(clip, adapter, "float32")
    kept = merged_values(clip, adapter, "keep")
    assert len(wide) == 8
    for name, values in wide.items():
        rounded = values.astype(ml_dtypes.bfloat16).astype(np.float32)
        assert not np.array_equal(values, rounded) and np.array_equal(kept[name], rounded)
        assert not np.array_equal(values.astype(np.float16), rounded.astype(np.float16)), "twice would be the same"
    merged_once = {"float32": np.float32, "float16": np.float16}
    for dtype, kind in merged_once.items():
        output = tmp_path / dtype
        verified = "full" if dtype == "float32" else "none"
        report = convert(
            clip, output, dtype=dtype, verify=verified, adapters=[(adapter, 1.0)], progress=Silent()  # type: ignore[arg-type]
        )  # fmt: skip
        assert report.checked == ("executed" if verified == "full" else "none")
        found = stored(output)
        assert found.keys() == wide.keys()
        assert all(np.array_equal(found[name], values.astype(kind)) for name, values in wide.items())


def test_streamed_and_verified_again(clip: Path, adapter: Path, tmp_path: Path) -> None:
    output = tmp_path / "package"
    report = convert(clip, output, verify="layers", adapters=[(adapter, 0.5)], progress=Silent())
    assert report.checked == "executed" and report.data["adapters"][0]["updated"] == 8
    assert Package.open(output).manifest.lineage.steps[0].options["dtype"] == "keep"
    assert verify(output, clip, adapters=[(adapter, 0.5)], progress=Silent()).checked == "executed"
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    tiny.edit_arrays(other / "adapter_model.safetensors", lambda arrays: [array.fill(0.5) for array in arrays.values()])
    for wrong in ([], [(adapter, 1.0)], [(other, 0.5)], [(adapter, 0.5), (adapter, 0.5)]):
        with pytest.raises(UsageError, match="not those that the package was made with") as caught:
            verify(output, clip, adapters=wrong, progress=Silent())
        assert "--adapter style=0.5" in caught.value.hint


def test_referenced_weights_cannot_be_merged(clip: Path, adapter: Path, tmp_path: Path) -> None:
    checkpoint = Exporter(Checkpoint.open(clip), [Adapter.open(adapter)]).checkpoint
    wanted = {made: checkpoint.dtype_of(made) for made in checkpoint.merged.values()}
    with (
        pytest.raises(UsageError, match="need another dtype or layout") as caught,
        package_writer(tmp_path / "package", False) as writer,
    ):
        refer_to_weights(checkpoint, wanted, writer)
    assert all("lora(style, 1)" in problem.where for problem in caught.value.problems)


@pytest.mark.sweep
def test_what_no_component_uses_is_a_note(tmp_path: Path) -> None:
    """A LLaVA reads the last layer but one of its tower; what an adapter does to the last one is lost."""
    root = tiny.llava(tmp_path / "llava")
    adapter = train(tmp_path / "adapter", root, "LlavaForConditionalGeneration", target_modules=QV)
    report = convert(root, tmp_path / "package", verify="none", adapters=[(adapter, 1.0)], progress=Silent())
    notes = [note for note in report.data["notes"] if "which no component uses" in note]
    assert len(notes) == 2 and all("vision_tower" in note and "layers.1.self_attn" in note for note in notes)


def test_the_plan_lists_adapters(clip: Path, adapter: Path, tmp_path: Path) -> None:
    report = convert(clip, tmp_path / "package", adapters=[(adapter, 2.0)], dry_run=True, progress=Silent())
    (listed,) = report.data["plan"]["adapters"]
    assert (listed["name"], listed["weight"]) == ("style", 2.0) and listed["digest"] == Adapter.open(adapter).digest


def test_a_compile_recipe_names_adapters(clip: Path, adapter: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "compile.yaml"
    text = f"""
__meta__: {{kind: compile-recipe, schema_version: "1.0", name: styled}}
checkpoint: {clip}
convert:
  adapters:
    - {{path: {adapter}, weight: 0.5}}
"""
    recipe.write_text(text)
    plan = compile_recipe(recipe, output=tmp_path / "out", dry_run=True, progress=Silent()).data["plan"]
    assert list(plan[0]["adapters"]) == [{"path": str(adapter), "weight": 0.5}]
    recipe.write_text(text.replace("0.5", "0"))
    with pytest.raises(UsageError, match="a number other than 0"):
        compile_recipe(recipe, output=tmp_path / "out", dry_run=True, progress=Silent())
