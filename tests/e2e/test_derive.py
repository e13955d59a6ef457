"""A draft for a type that no shipped template fits, its refusals, and how few lines are edited before it converts."""

from __future__ import annotations

import difflib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcpc.core.progress import Silent
from mcpc.errors import BadInputError, UnsupportedError, UsageError
from mcpc.templates.match import load_templates
from mcpc.workflows.derive import derive_template

ROOT = Path(__file__).resolve().parent.parent.parent
FINISHED = ROOT / "examples" / "templates"
GUIDE = (ROOT / "docs" / "deriving_a_template.md").read_text(encoding="utf-8")
TYPES = ("audioflamingo3", "owlvit", "vision-text-dual-encoder")
MOST_EDITED_LINES = 10

Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Return a function from a model type to its tiny checkpoint."""
    pytest.importorskip("torch")
    base = tmp_path_factory.mktemp("outside")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        from tiny.build import write
        from tiny.outside import OUTSIDE

        def write_once(model_type: str) -> Path:
            root = base / model_type
            if not root.exists():
                architecture, tiny = OUTSIDE[model_type]
                write(architecture, tiny(), root)
            return root

        yield write_once


def shown_diff(model_type: str) -> list[str]:
    """Return the lines of a type's diff in the guide."""
    found = re.search(rf"```diff\n--- {model_type}\.yaml.*?\n\+\+\+ .*?\n(.*?)```", GUIDE, re.DOTALL)
    assert found is not None, f"the guide shows no diff of {model_type}"
    return found[1].splitlines()


def edited_lines(diff: list[str]) -> int:
    """Return how many lines were changed, added or removed; a changed line counts once."""
    hunks = "\n".join(diff).split("@@ -")[1:]
    signs = [[line[:1] for line in hunk.splitlines()[1:]] for hunk in hunks]
    return sum(max(hunk.count("-"), hunk.count("+")) for hunk in signs)


def test_the_three_types_are_outside_the_shipped_templates() -> None:
    known = {name for template in load_templates() for name in template.match.architectures}
    for model_type in TYPES:
        (line,) = re.findall(r"architectures: \[(\w+)\]", (FINISHED / f"{model_type}.yaml").read_text())
        assert line not in known


@pytest.mark.parametrize("model_type", TYPES)
def test_the_guide_counts_the_edited_lines(model_type: str) -> None:
    count = edited_lines(shown_diff(model_type))
    assert 0 < count <= MOST_EDITED_LINES
    assert re.search(rf"`{model_type}` \| {count} \|", GUIDE), f"{model_type}: the guide does not say {count}"


@pytest.mark.parametrize("model_type", TYPES)
def test_the_draft_is_that_of_the_guide(model_type: str, make: Make) -> None:
    pytest.importorskip("torch")
    from mcpc.checkpoint import Checkpoint
    from mcpc.export.derive import sketch

    draft = sketch(Checkpoint.open(make(model_type)), Silent()).draft
    assert draft.count("finish") == 0
    assert edits(draft.render(), model_type) == shown_diff(model_type)


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", TYPES)
def test_the_draft_traces_and_its_finished_form_converts_checked(model_type: str, make: Make, tmp_path: Path) -> None:
    from mcpc.workflows.convert import convert

    draft = tmp_path / "draft.yaml"
    report = derive_template(make(model_type), draft, progress=Silent())
    assert report.data["shipped"] is None
    assert draft.read_text(encoding="utf-8") == report.data["text"]
    assert edits(report.data["text"], model_type) == shown_diff(model_type)
    for number, template in enumerate((draft, FINISHED / f"{model_type}.yaml")):
        package = tmp_path / f"package{number}"
        assert convert(make(model_type), package, template_file=template, progress=Silent()).checked == "executed"


def edits(draft: str, model_type: str) -> list[str]:
    finished = (FINISHED / f"{model_type}.yaml").read_text(encoding="utf-8")
    return list(difflib.unified_diff(draft.splitlines(), finished.splitlines(), n=0, lineterm=""))[2:]


def test_a_text_model_is_refused_by_name(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "text")
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM reads nothing but text"):
        derive_template(tmp_path / "text", progress=Silent())


def test_bad_checkpoints_are_refused_before_anything_is_built(make: Make, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(make(TYPES[-1]), broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"architectures": []}))
    with pytest.raises(BadInputError, match="names no architecture"):
        derive_template(broken, progress=Silent())
    (broken / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    with pytest.raises(UnsupportedError, match="has no NoSuchModel"):
        derive_template(broken, progress=Silent())
    (broken / "config.json").write_text(json.dumps(config | {"projection_dim": 25}))
    with pytest.raises(BadInputError, match="does not fit its config: 0 missing, 0 unexpected, 2 wrong shape"):
        derive_template(broken, progress=Silent())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(BadInputError, match="truncated tensor file"):
        derive_template(broken, progress=Silent())
    (broken / "config.json").unlink()
    with pytest.raises(BadInputError, match=r"config\.json is missing"):
        derive_template(broken, progress=Silent())


def test_an_output_that_exists_is_kept(tmp_path: Path) -> None:
    kept = tmp_path / "mine.yaml"
    kept.write_text("mine")
    with pytest.raises(UsageError, match="the output exists"):
        derive_template(tmp_path, kept, progress=Silent())
    with pytest.raises(UsageError, match="the output is a folder"):
        derive_template(tmp_path, tmp_path, progress=Silent())
    assert kept.read_text() == "mine"
