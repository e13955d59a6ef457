"""Print what compiled models answer beside what PyTorch answers, the sizes, and the engines' planned memory.

    python examples/compare_with_pytorch.py out/demo/fashion-llava out/demo/fashion-clip

Each folder is the output of `mcpc compile`. The PyTorch side uses transformers directly, and nothing of mcpc but the
answers in `compile.json`. Exits with 1 when an answer of the float package differs from PyTorch's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from transformers import CLIPModel, LlavaForConditionalGeneration

EXAMPLES = Path(__file__).resolve().parent
IMAGE_TOKENS = 16


def pixel_values(path: Path) -> torch.Tensor:
    """Return [1,3,32,32] in -1..1, as the two models were trained (the images are 32x32 already)."""
    pixels = np.asarray(Image.open(path).convert("RGB"), np.float32) / 255
    return torch.from_numpy((pixels.transpose(2, 0, 1)[None] - 0.5) / 0.5)


def ask_llava(checkpoint: Path, requests: list[dict[str, Any]]) -> list[str]:
    """Return PyTorch's greedy answers, with the bfloat16 weights widened to float32."""
    model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    answers = []
    for request in requests:
        prompt = f"USER: {'<image>' * IMAGE_TOKENS}\n{request['prompt']} ASSISTANT:"
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        pixels = pixel_values(checkpoint / request["image"])
        with torch.no_grad():
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels,
                                 max_new_tokens=32, do_sample=False)  # fmt: skip
        answers.append(str(tokenizer.decode(out[0, ids.shape[1] :].tolist())).strip())
    return answers


def ask_clip(checkpoint: Path, requests: list[dict[str, Any]]) -> list[str]:
    """Return the texts that PyTorch scores highest."""
    model = CLIPModel.from_pretrained(checkpoint).eval()
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.enable_padding(pad_id=0, pad_token="<pad>")
    answers = []
    for request in requests:
        encoded = tokenizer.encode_batch([f"{text}</s>" for text in request["texts"]])
        with torch.no_grad():
            out = model(
                input_ids=torch.tensor([item.ids for item in encoded]),
                attention_mask=torch.tensor([item.attention_mask for item in encoded]),
                pixel_values=pixel_values(checkpoint / request["image"]),
            )
        answers.append(str(request["texts"][int(out.logits_per_image[0].argmax())]))
    return answers


ASK = {"fashion-llava": ask_llava, "fashion-clip": ask_clip}


def megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


def planned_bytes(engine: dict[str, Any]) -> tuple[int, int, int]:
    """Return weights, activations and scratch of an engine; the latter two are the largest over its profiles."""
    memory = engine["memory"]
    activation, scratch = (
        max(item[key] for item in memory["profiles"]) for key in ("activation_bytes", "scratch_bytes")
    )
    return memory["weights_bytes"], activation, scratch


def show_answers(console: Console, name: str, report: dict[str, Any]) -> bool:
    """Print one row per request; return True when the float package agrees with PyTorch on all of them."""
    packages = [package["name"] for package in report["packages"]]
    table = Table("asked", "PyTorch", *packages, title=name, title_justify="left", box=None)
    agree = True
    requests = [item["request"] for item in report["answers"]]
    references = ASK[name](EXAMPLES / name, requests)
    for request, item, reference in zip(requests, report["answers"], references, strict=True):
        said = [item["answers"][package]["text"] for package in packages]
        agree &= said[0] == reference
        question = request.get("prompt") or f"which of {len(request['texts'])} texts"
        table.add_row(f"{Path(request['image']).stem}: {question}", reference, *said)
    console.print(table)
    return agree


def show_sizes(console: Console, report: dict[str, Any]) -> None:
    """Print sizes of the checkpoint, the packages and the engines, and what the engines plan to use."""
    table = Table("made", "size", "weights", "activations", "scratch", "checked", box=None)
    table.add_row("checkpoint", megabytes(report["checkpoint"]["bytes"]), "", "", "", "")
    for package in report["packages"]:
        table.add_row(f"{package['name']} package", megabytes(package["total_bytes"]), "", "", "", package["checked"])
    for folder in report["engines"]:
        for engine in folder["engines"]:
            memory = map(megabytes, planned_bytes(engine))
            table.add_row(
                f"{folder['name'].removeprefix('engines/')} {engine['component']}",
                megabytes(engine["file_bytes"]),
                *memory,
                engine["checked"],
            )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="outputs of mcpc compile")
    transformers.utils.logging.disable_progress_bar()
    console = Console(highlight=False)
    agree = True
    for folder in parser.parse_args().folders:
        report = json.loads((folder / "compile.json").read_text(encoding="utf-8"))
        agree &= show_answers(console, report["name"], report)
        show_sizes(console, report)
        console.print(f"times: {', '.join(f'{key} {value:.1f} s' for key, value in report['times_s'].items())}\n")
    console.print("float packages answer as PyTorch does" if agree else "A FLOAT PACKAGE DIFFERS FROM PYTORCH")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
