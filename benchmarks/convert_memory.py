"""Time and peak memory of converting LLaVA-like checkpoints of many sizes, each in a fresh process.

Run: python benchmarks/convert_memory.py [CASE ...] [--output docs/figures/convert_memory.json]

`depth-12` and `depth-24` have real bytes (random float16, 1.05B and 1.66B parameters), so that copying is honest.
`7b` and `70b` are sparse files of the real geometry, converted with `--weights reference`. `checked` cases are
verified: `checked-1b`, and `checked-7b` with 14 GB of random float16 on disk. Peak resident memory is the process's own
high-water mark (`VmHWM`); the stage before verification is reported apart.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mcpc.storage.safetensors import Plan, write_stream

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "fashion-llava"
VISION = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14, "projection_dim": 768,
}  # fmt: skip


def llama(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, int]:
    """Return the geometry of a Llama."""
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128, "vocab_size": vocabulary,
    }  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A checkpoint and how it is converted."""

    text: Mapping[str, int]
    shards: int = 1
    sparse: bool = False
    options: Sequence[str] = field(default=("--verify", "none"))


SPARSE = ("--verify", "none", "--weights", "reference")
CASES = {
    "depth-12": Case(llama(12, 2048, 5504, 16, 16, 32064)),
    "depth-24": Case(llama(24, 2048, 5504, 16, 16, 32064)),
    "7b": Case(llama(32, 4096, 11008, 32, 32, 32064), 3, sparse=True, options=SPARSE),
    "70b": Case(llama(80, 8192, 28672, 64, 8, 128256), 30, sparse=True, options=SPARSE),
    "checked-1b": Case(llama(12, 2048, 5504, 16, 16, 32064), options=()),
    "checked-7b": Case(llama(32, 4096, 11008, 32, 32, 32064), 3, options=()),
}


def make_checkpoint(root: Path, case: Case) -> int:
    """Write a float16 LLaVA of CLIP-L vision geometry; return its parameters."""
    from mcpc.export.skeleton import build_skeleton

    root.mkdir(parents=True)
    config = json.loads((EXAMPLE / "config.json").read_text())
    config["dtype"] = "float16"
    config["text_config"] |= case.text
    config["text_config"]["max_position_embeddings"] = 4096
    config["vision_config"] |= VISION
    config["image_seq_length"] = (VISION["image_size"] // VISION["patch_size"]) ** 2
    (root / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(EXAMPLE / name, root / name)
    (root / "preprocessor_config.json").write_text(json.dumps(_preprocessor(VISION["image_size"])))
    model = build_skeleton(root, "LlavaForConditionalGeneration", "float32")
    plans = [
        Plan(name, "float16", tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
        if tensor.device.type == "meta"
    ]
    random = np.random.default_rng(0)
    names = [f"model-{number + 1:05}-of-{case.shards:05}.safetensors" for number in range(case.shards)]
    weight_map: dict[str, str] = {}
    per_shard = -(-len(plans) // case.shards)
    for number, file_name in enumerate(names):
        part = plans[number * per_shard : (number + 1) * per_shard]
        weight_map |= {plan.name: file_name for plan in part}
        with (root / file_name).open("wb") as file:
            if case.sparse:
                _write_sparse(file, part)
            else:
                write_stream(file, part, (_random(random, plan.shape) for plan in part))
    parameters = sum(int(np.prod(plan.shape)) for plan in plans)
    index = {"metadata": {"total_size": 2 * parameters}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return parameters


def _preprocessor(size: int) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((EXAMPLE / "preprocessor_config.json").read_text())
    for key in ("size", "crop_size"):
        if isinstance(config.get(key), dict):
            config[key] = dict.fromkeys(config[key], size)
    return config


def _random(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return weights of a scale that keeps activations of a deep stack of order one; norms near one."""
    values = random.standard_normal(shape, np.float32)
    return (values * (0.5 / np.sqrt(shape[-1])) if len(shape) > 1 else 1 + 0.1 * values).astype(np.float16)


def _write_sparse(file: Any, plans: Sequence[Plan]) -> None:
    """Write a header, then a hole of the tensors' size."""
    header, offset = {}, 0
    for plan in plans:
        size = 2 * int(np.prod(plan.shape))
        header[plan.name] = {"dtype": "F16", "shape": list(plan.shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    file.write(len(raw).to_bytes(8, "little") + raw)
    file.truncate(8 + len(raw) + offset)


def convert(checkpoint: Path, output: Path, options: Sequence[str]) -> dict[str, Any]:
    """Convert in a fresh process; return wall time, peak memory and what was written."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "mcpc", "convert", str(checkpoint), "-o", str(output), "--json", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stdout + result.stderr)
    document = json.loads(result.stdout)
    return {
        "wall_s": round(time.perf_counter() - started, 1),
        "checked": document["checked"],
        "peak_rss_bytes": document["peak_rss_bytes"],
        "package_bytes": document["package_bytes"],
        "stages": {name: round(value, 1) for name, value in document["stages"].items()},
    }


def main() -> None:
    """Measure, print and write the figures; cases that are not asked for keep their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["depth-12", "depth-24", "7b", "70b"], metavar="CASE")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    unknown = sorted(set(options.cases) - set(CASES))
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    known = options.output is not None and options.output.is_file()
    rows = json.loads(options.output.read_text()) if known else {}
    for name in options.cases:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Path(folder) / "checkpoint"
            parameters = make_checkpoint(checkpoint, CASES[name])
            figures = convert(checkpoint, Path(folder) / "package", CASES[name].options)
        rows[name] = {"parameters": parameters, "options": " ".join(CASES[name].options), **figures}
        print(json.dumps({name: rows[name]}))
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
