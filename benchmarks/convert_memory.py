"""Peak memory and time of converting a random LLaVA-like checkpoint, at one depth and at twice the depth.

Run: python benchmarks/convert_memory.py [--layers 16] [--output docs/figures/convert_memory.json]

The checkpoint has real bytes (random float16), so that copying is honest. Each conversion runs in a fresh process
with `--verify none`; its peak resident memory is its own high-water mark (`VmHWM`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from mcpc.storage.safetensors import Plan, write_stream

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "fashion-llava"


def make_checkpoint(root: Path, layers: int) -> int:
    """Write a random float16 LLaVA of CLIP-L vision geometry with `layers` Llama layers; return its parameters."""
    from mcpc.export.skeleton import build_skeleton

    root.mkdir(parents=True)
    config = json.loads((EXAMPLE / "config.json").read_text())
    config["dtype"] = "float16"
    config["text_config"] |= {
        "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": layers, "num_attention_heads": 16,
        "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 32064,
    }  # fmt: skip
    config["vision_config"] |= {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "image_size": 336, "patch_size": 14, "projection_dim": 768,
    }  # fmt: skip
    (root / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "generation_config.json"):
        shutil.copyfile(EXAMPLE / name, root / name)
    model = build_skeleton(root, "LlavaForConditionalGeneration", "float32")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if tensor.device.type == "meta"}
    random = np.random.default_rng(0)
    plans = [Plan(name, "float16", shape) for name, shape in shapes.items()]
    with (root / "model.safetensors").open("wb") as file:
        write_stream(
            file, plans, ((random.standard_normal(p.shape, np.float32) * 0.02).astype(np.float16) for p in plans)
        )
    return sum(int(np.prod(shape)) for shape in shapes.values())


def convert(checkpoint: Path, output: Path, verify: str) -> dict[str, Any]:
    """Convert in a fresh process; return wall time and peak memory."""
    started = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "mcpc",
        "convert",
        str(checkpoint),
        "-o",
        str(output),
        "--verify",
        verify,
        "--json",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stdout + result.stderr)
    document = json.loads(result.stdout)
    return {
        "wall_s": round(time.perf_counter() - started, 1),
        "peak_rss_bytes": document["peak_rss_bytes"],
        "stages": document["stages"],
    }


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--verify", default="none", choices=("none", "full"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for layers in (options.layers, 2 * options.layers):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Path(folder) / "checkpoint"
            parameters = make_checkpoint(checkpoint, layers)
            figures = convert(checkpoint, Path(folder) / "package", options.verify)
            rows.append({"layers": layers, "parameters": parameters, "verify": options.verify, **figures})
            print(json.dumps(rows[-1]))
            if options.verify == "full":
                break
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
