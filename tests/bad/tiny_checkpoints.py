"""Tiny checkpoints that transformers writes, for tests that damage them, and edits of their files."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import transformers as hf

from mcpc.storage.safetensors import Plan, read_header, write_stream

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from tiny.build import END, PAD, START, Tiny, write
from tiny.processors import clip_images

ROWS = 101
IMAGE_TOKEN = "<image>"
IMAGE_ID = 90
TEXT = {
    "vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": PAD,
    "bos_token_id": START, "eos_token_id": END,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
GENERATION = {"eos_token_id": END, "pad_token_id": PAD, "bos_token_id": START}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {np.dtype(ml_dtypes.bfloat16): "bfloat16", np.dtype(ml_dtypes.float8_e4m3fn): "float8_e4m3fn"}


def clip(root: Path, **text: Any) -> Path:
    """Write a CLIP of two layers a tower."""
    values = {name: value for name, value in TEXT.items() if name not in ("num_key_value_heads", "head_dim")}
    config = hf.CLIPConfig(text_config={**values, **text}, vision_config=VISION, projection_dim=24)
    write("CLIPModel", Tiny(config, files=clip_images(32), vocabulary=ROWS), root)
    return root


def llava(root: Path, *, strategy: str = "default", files: Mapping[str, Any] | None = None, **text: Any) -> Path:
    """Write a LLaVA of a CLIP tower and a Llama; 16 rows an image, 17 with the strategy "full"."""
    processor = {
        "image_token": IMAGE_TOKEN, "patch_size": 8, "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": strategy,
    }  # fmt: skip
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION), text_config=hf.LlamaConfig(**{**TEXT, **text}),
        image_token_index=IMAGE_ID, vision_feature_layer=-2, vision_feature_select_strategy=strategy,
        image_seq_length=17 if strategy == "full" else 16,
        tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
    )  # fmt: skip
    written = {**clip_images(32), "processor_config.json": processor, **(files or {})}
    tiny = Tiny(config, {IMAGE_TOKEN: IMAGE_ID}, written, GENERATION, vocabulary=ROWS)
    write("LlavaForConditionalGeneration", tiny, root)
    edit_json(root / "tokenizer_config.json", image_token=IMAGE_TOKEN)
    return root


def shard(root: Path) -> dict[str, str]:
    """Let transformers write the checkpoint again in shards of 20 KB; return {tensor: shard}."""
    architecture = json.loads((root / "config.json").read_text())["architectures"][0]
    model = getattr(hf, architecture).from_pretrained(root)
    (root / SINGLE).unlink()
    model.save_pretrained(root, max_shard_size="20KB")
    weight_map: dict[str, str] = json.loads((root / INDEX).read_text())["weight_map"]
    assert len(set(weight_map.values())) > 2
    return weight_map


def arrays_of(path: Path) -> dict[str, Any]:
    """Return {tensor: array} of a safetensors file."""
    return {name: np.array(entry.read()) for name, entry in read_header(path).items()}


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write a safetensors file."""
    plans = [Plan(name, _DTYPES.get(array.dtype, array.dtype.name), array.shape) for name, array in arrays.items()]
    with path.open("wb") as file:
        write_stream(file, plans, iter(arrays.values()))


def edit_arrays(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Let `change` edit {tensor: array} of a safetensors file, and write it again."""
    arrays = arrays_of(path)
    change(arrays)
    write_arrays(path, arrays)


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Let `change` edit the JSON header of a safetensors file; the tensor bytes stay as they are."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def edit_json(path: Path, **values: Any) -> None:
    """Set keys of a JSON file, `a__b` for a nested one; None removes one."""
    content = json.loads(path.read_text())
    for name, value in values.items():
        target, parts = content, name.split("__")
        for part in parts[:-1]:
            target = target[part]
        target[parts[-1]] = value
        if value is None:
            del target[parts[-1]]
    path.write_text(json.dumps(content))


def state_of(root: Path) -> dict[str, tuple[str, int, bool]]:
    """Return {file: (SHA-256, mtime, whether it is a link)} of a tree."""
    return {
        path.relative_to(root).as_posix(): (
            hashlib.sha256(path.read_bytes()).hexdigest(), path.lstat().st_mtime_ns, path.is_symlink()
        )
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }  # fmt: skip
