"""The same 0.9B checkpoint through mcpc, plain `torch.onnx.export` and transformers' own exporter, in one run.

    python benchmarks/convert.py [--output docs/figures/convert.json]

A LLaVA with CLIP-L's vision tower and ten Llama layers, random float16. Each tool has a fresh process. Reported are
wall time with imports, the process's peak resident memory, the bytes that it wrote, the files with a graph, and ratios
to mcpc. `mcpc` converts with `--verify none`, since neither of the others compares anything; `mcpc checked` is the
default command. What is not equal is said in each row: the graphs of `torch.onnx.export` have no cache, so they cannot
decode, and its exporter does not translate the forward that joins them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from convert_memory import Case, llama, make_checkpoint

CHECKPOINT = Case(llama(10, 2048, 5504, 16, 16, 32064))
TOOLS = ("mcpc", "torch.onnx.export", "transformers", "mcpc checked")
GIVES = {
    "mcpc": "vision encoder, embedding, decoder with cache; any batch, images, length",
    "mcpc checked": "the same, compared with PyTorch",
    "torch.onnx.export": "image features and text as two graphs, no cache, nothing that joins them",
    "transformers": "a graph for each stage of generate",
}


def sample_inputs(model: Any) -> dict[str, Any]:
    """Return two prompts with an image each, as the model's forward takes them."""
    import torch

    config = model.config
    ids = torch.full((2, config.image_seq_length + 7), 5)
    ids[:, 1 : 1 + config.image_seq_length] = config.image_token_id
    size = config.vision_config.image_size
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.zeros(2, 3, size, size, dtype=model.dtype),
    }


def load(checkpoint: Path) -> Any:
    """Return the model as its documentation loads it, in the checkpoint's own dtype."""
    import transformers

    return transformers.LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype="auto").eval()


def with_torch(checkpoint: Path, output: Path) -> None:
    """Export the image features and the text's forward, as two graphs without a cache.

    The whole forward does not translate: its check of the image tokens needs an operator that PyTorch's exporter lacks.
    """
    import torch

    class Features(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, pixel_values: Any) -> Any:
            return self.model.get_image_features(pixel_values=pixel_values).pooler_output

    class Text(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits

    model = load(checkpoint)
    inputs = sample_inputs(model)
    inputs["input_ids"][:] = 5
    auto = torch.export.Dim.AUTO
    shapes = {"input_ids": (auto, auto), "attention_mask": (auto, auto), "pixel_values": (auto, None, None, None)}
    for name, module, names in (
        ("vision", Features(model), ["pixel_values"]),
        ("text", Text(model), ["input_ids", "attention_mask"]),
    ):
        program = torch.onnx.export(
            module,
            (),
            kwargs={key: inputs[key] for key in names},
            dynamic_shapes={key: shapes[key] for key in names},
            dynamo=True,
        )
        if program is None:
            raise SystemExit("torch.onnx.export gave nothing")
        program.save(output / f"{name}.onnx", external_data=True)


def with_transformers(checkpoint: Path, output: Path) -> None:
    """Export each stage of `generate` with transformers' exporter."""
    from transformers.exporters.configs import OnnxConfig
    from transformers.exporters.exporter_onnx import OnnxExporter

    model = load(checkpoint)
    exported = OnnxExporter().export_for_generation(model, sample_inputs(model), OnnxConfig(dynamic=True))
    exported.save_pretrained(output)


OTHERS: dict[str, Callable[[Path, Path], None]] = {
    "torch.onnx.export": with_torch,
    "transformers": with_transformers,
}


def run(tool: str, checkpoint: Path, output: Path) -> dict[str, Any]:
    """Run a tool in a fresh process and measure it; a tool that fails has its last line as its row."""
    if tool in OTHERS:
        output.mkdir()
        command = [sys.executable, __file__, "--run", tool, str(checkpoint), str(output)]
    else:
        options = [] if tool.endswith("checked") else ["--verify", "none"]
        command = [sys.executable, "-m", "mcpc", "convert", str(checkpoint), "-o", str(output), "--json", *options]
    begun = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wall_s = time.perf_counter() - begun
    if result.returncode:
        return {"gives": f"failed: {result.stderr.strip().splitlines()[-1][:300]}"}
    files = [path for path in output.rglob("*") if path.is_file()]
    return {
        "wall_s": round(wall_s, 1),
        "peak_rss_bytes": json.loads(result.stdout)["peak_rss_bytes"],
        "written_bytes": sum(path.stat().st_size for path in files),
        "graphs": sorted(path.name for path in files if path.suffix == ".onnx"),
        "gives": GIVES[tool],
    }


def with_ratios(row: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its figures as multiples of those of the first."""
    names = [name for name in ("wall_s", "peak_rss_bytes", "written_bytes") if name in row and name in first]
    return {**row, "ratios": {name: round(row[name] / first[name], 2) for name in names}}


def main() -> None:
    """Run every tool on one checkpoint, print the rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        from mcpc.workflows.environment import peak_rss_bytes

        tool, checkpoint, output = options.run
        with contextlib.redirect_stdout(sys.stderr):
            OTHERS[tool](Path(checkpoint), Path(output))
        print(json.dumps({"peak_rss_bytes": peak_rss_bytes()}))
        return
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        rows["checkpoint"] = {"parameters": make_checkpoint(checkpoint, CHECKPOINT)}
        for number, tool in enumerate(options.tools):
            row = run(tool, checkpoint, Path(folder) / f"output-{number}")
            rows[tool] = with_ratios(row, rows.get("mcpc", row))
            print(json.dumps({tool: rows[tool]}))
    if options.output:
        options.output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
