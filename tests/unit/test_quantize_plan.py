"""What happens to each weight is decided before anything is done, with a reason that can be read."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from quantize_graphs import INT4, INT8, gaussian, model_of, recipe_of

from mcpc.core.passes import Pass, PassResult
from mcpc.core.pipeline import Pipeline
from mcpc.core.progress import Silent
from mcpc.core.runner import Array
from mcpc.errors import BadInputError, McpcError, UsageError
from mcpc.graph.io import serialize
from mcpc.passes.quantize.plan import Decision
from mcpc.passes.registry import RECIPE_PASSES
from mcpc.workflows.quantize_steps import Options, load_recipe, plan_for, refuse_quantized, rewrite


def plan_of(body: str, recipe: object = INT4, **weights: Array) -> dict[str, Decision]:
    declared = ", ".join(f"float[{','.join(map(str, value.shape))}] {name}" for name, value in weights.items())
    model = model_of(body.replace("WEIGHTS", declared), **weights)
    return {decision.weight.name: decision for decision in plan_for({"": model}, recipe, {})}  # type: ignore[arg-type]


def matmul(depth: int, width: int, recipe: object = INT4) -> Decision:
    body = f"g (float[b,s,{depth}] x, WEIGHTS) => (float[b,s,{width}] y) {{ y = MatMul (x, w) }}"
    return plan_of(body, recipe, w=gaussian(depth, width))["w"]


@pytest.mark.parametrize(
    ("depth", "width", "block", "form", "reason"),
    [
        (64, 32, 32, "int4 block 32", ""),
        (256, 32, 128, "int4 block 128", ""),
        (192, 32, 128, "int4 block 64", "K = 192 is no multiple of 128: block 64"),
        (4320, 2, 64, "int4 block 32", "K = 4320 is no multiple of 64: block 32"),
        (64, 33, 32, "int4 block 32, padded to an even width", ""),
        (80, 32, 32, "int8 per channel", "K = 80 is no multiple of 32, nor of a smaller block: no INT4"),
        (4304, 2, 128, "int8 per channel", "K = 4304 is no multiple of 128, nor of a smaller block: no INT4"),
        (8, 8, 32, "None", "small: 64 elements, below 1024"),
    ],
)
def test_linear_weights(depth: int, width: int, block: int, form: str, reason: str) -> None:
    recipe = recipe_of(f"quantize.linear-int4, options: {{block: {block}}}", "quantize.linear-int8")
    decision = matmul(depth, width, recipe)
    assert (str(decision.form), decision.reason) == (form, reason)


def test_what_stays_wide_says_why() -> None:
    body = """g (float[1,8,16,16] x, float[16,b] u, float[16,16] v, int64[n] ids, WEIGHTS)
        => (o1, o2, o3, o4, o5, o6, o7) {
        o1 = Conv (x, conv)
        c = LayerNormalization (o1, norm)
        o2 = MatMul (left, u)
        o3 = Gemm <alpha = 0.5> (v, scaled)
        o4 = Gather (small, ids)
        o5 = Gather <axis = 1> (sideways, ids)
        o6 = Add (v, added)
        o7 = Add (c, bias) }"""
    plan = plan_of(
        body, conv=gaussian(8, 8, 4, 4), norm=gaussian(13), left=gaussian(80, 16), scaled=gaussian(16, 80),
        small=gaussian(4, 8),
        sideways=gaussian(64, 64), added=gaussian(16, 16), bias=gaussian(13),
    )  # fmt: skip
    assert {name: decision.reason for name, decision in plan.items() if decision.form is None} == {
        "conv": "a convolution stays wide",
        "norm": "a vector, used by LayerNormalization",
        "left": "left operand of a MatMul",
        "scaled": "a Gemm with transA, alpha or beta",
        "small": "a small table: 32 elements, below 64",
        "sideways": "gathered along another axis than rows",
        "added": "used by Add",
        "bias": "a vector, used by Add",
    }


def test_a_weight_that_is_also_added_stays_wide() -> None:
    plan = plan_of("g (float[64,64] x, WEIGHTS) => (y) { h = MatMul (x, w)\n y = Add (h, w) }", w=gaussian(64, 64))
    assert plan["w"].form is None
    assert plan["w"].reason == "used by Add"


def test_weights_inside_functions_are_listed() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21, "f" : 1]>
        g (float[3] x) => (y) { y = f.Shift (x) }
        <opset_import: ["" : 21], domain: "f">
        Shift (x) => (y) { c = Constant <value = float[3] {1, 2, 3}> ()  y = Add (x, c) }"""
    (decision,) = plan_for({"": ir.from_onnx_text(text)}, INT4, {})
    assert (decision.weight.name, decision.form, decision.weight.sites[0].unfit) == (
        "Shift/c",
        None,
        "inside a function body",
    )


def test_a_tie_over_two_components_is_one_decision() -> None:
    table = ir.Tensor(gaussian(101, 64), name="t")
    embed = model_of(
        "g (int64[b] ids, float[101,64] t) => (float[b,64] y) { y = Gather (t, ids) }", t=gaussian(101, 64)
    )
    head = model_of(
        "g (float[b,64] x, float[101,64] t) => (float[b,101] y) { y = Gemm <transB = 1> (x, t) }", t=gaussian(101, 64)
    )
    for model in (embed, head):
        model.graph.initializers["t"].const_value = table
    (decision,) = plan_for({"embed": embed, "head": head}, INT4, {})
    assert decision.pass_id == "quantize.embedding-int8"
    assert [site.component for site in decision.weight.sites] == ["embed", "head"]
    separate = plan_for(
        {
            "embed": embed,
            "head": model_of(
                "g (float[b,64] x, float[101,64] t) => (y) { y = Gemm <transB = 1> (x, t) }", t=gaussian(101, 64)
            ),
        },
        INT4,
        {},
    )
    assert [item.pass_id for item in separate] == ["quantize.embedding-int8", "quantize.linear-int4"]


def two_linears() -> ir.Model:
    body = """g (float[n,s,64] x, float[64,64] a, float[64,64] b) => (float[n,s,64] y) {
        h = MatMul (x, a)
        y = MatMul (h, b) }"""
    return model_of(body, a=gaussian(64, 64, seed=1), b=gaussian(64, 64, seed=2))


@pytest.mark.parametrize(
    ("options", "forms"),
    [
        (Options(keep_int8=("part/a",)), ["int8 per channel", "int4 block 32"]),
        (Options(keep_int8=("checkpoint.*.b",)), ["int4 block 32", "int8 per channel"]),
        (Options(keep_wide=("a",)), ["None", "int4 block 32"]),
        (Options(block=64), ["int4 block 64", "int4 block 64"]),
    ],
)
def test_options_of_the_command_line(options: Options, forms: list[str]) -> None:
    names = {("part", "a"): "checkpoint.layer.a", ("part", "b"): "checkpoint.layer.b"}
    plan = plan_for({"part": two_linears()}, load_recipe("int4", options), names)
    assert [str(decision.form) for decision in plan] == forms


REFUSALS: dict[str, tuple[str, Options, type[McpcError], str]] = {
    "unknown name": ("int5", Options(), BadInputError, r"int5: no such recipe \(expected int4, int8, got int5\)"),
    "missing file": ("none.yaml", Options(), BadInputError, "none.yaml: no such file"),
    "no INT4 step": ("int8", Options(block=32), UsageError, "int8: the recipe has no INT4 step"),
}


@pytest.mark.parametrize("case", list(REFUSALS))
def test_refused_recipes(case: str) -> None:
    name, options, kind, text = REFUSALS[case]
    with pytest.raises(kind, match=text):
        load_recipe(name, options)


def test_a_block_that_no_runtime_takes_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--block: no such block size \(expected 32, 64, 128, got 48\)"):
        load_recipe("int4", Options(block=48))


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(BadInputError, match="nothing-\\*: matches no weight"):
        plan_for({"": two_linears()}, load_recipe("int4", Options(keep_int8=("nothing-*",))), {})


def test_the_order_of_the_steps_is_checked_before_work() -> None:
    model = two_linears()
    before = serialize(model)
    recipe = recipe_of("quantize.linear-int8", "quantize.linear-int4", "quantize.linear-int8")
    with pytest.raises(BadInputError) as caught:
        plan_for({"": model}, recipe, {})
    assert [str(problem) for problem in caught.value.problems] == [
        "quantize.linear-int8: comes twice",
        "quantize.linear-int8: in the wrong order (expected after quantize.linear-int4, got before it)",
    ]
    assert serialize(model) == before


def test_a_pipeline_runs_in_order_and_shows_every_pass() -> None:
    seen: list[str] = []

    class Watch:
        def before(self, pass_: Pass[Any], _: ir.Model) -> None:
            seen.append(f"before {pass_.id}")

        def after(self, pass_: Pass[Any], _: ir.Model, result: PassResult) -> None:
            seen.append(f"after {pass_.id} {result.modified}")

    passes = [RECIPE_PASSES[step.pass_id](step.options) for step in INT8.steps]
    Pipeline(passes).run(two_linears(), [Watch()])
    assert seen == [
        "before quantize.embedding-int8", "after quantize.embedding-int8 False",
        "before quantize.linear-int8", "after quantize.linear-int8 True",
    ]  # fmt: skip


@pytest.mark.parametrize("recipe", [INT4, INT8], ids=["int4", "int8"])
def test_quantized_graphs_are_refused(recipe: object) -> None:
    model = two_linears()
    refuse_quantized({"part": model}, "file")
    plan = plan_for({"": model}, recipe, {})  # type: ignore[arg-type]
    rewrite({"": model}, recipe, plan, Silent())  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match=r"already quantized: part: .*a DequantizeLinear node") as caught:
        refuse_quantized({"part": model}, "file")
    assert len(caught.value.problems) == 2


def test_quantized_tables_are_refused() -> None:
    model = model_of("g (int64[b] ids, float[40,64] w) => (y) { y = Gather (w, ids) }", w=gaussian(40, 64))
    rewrite({"": model}, INT8, plan_for({"": model}, INT8, {}), Silent())
    with pytest.raises(BadInputError, match=r"w\.int8: a gathered table of int8"):
        refuse_quantized({"": model}, "file")


def test_integer_weights_are_no_weights() -> None:
    model = model_of("g (int64[b] ids, int64[40] w) => (int64[b] y) { y = Gather (w, ids) }", w=np.arange(40))
    assert plan_for({"": model}, INT4, {}) == ()
