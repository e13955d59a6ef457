"""Adapters that peft trains on tiny checkpoints, peft's model with them beside the weights, and mcpc's merged one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as hf

sys.path.append(str(Path(__file__).resolve().parents[1] / "bad"))
import tiny_checkpoints as tiny

from mcpc.checkpoint import Checkpoint
from mcpc.checkpoint.adapters import Adapter
from mcpc.export.convert import Exporter
from mcpc.export.reference import _load

#: Of a merged model's outputs from those of peft's unmerged one, in float32.
MAX_ABS = 1e-5
QV = ["q_proj", "v_proj"]


def train(root: Path, checkpoint: Path, cls: str, *, seed: int = 1, **options: Any) -> Path:
    """Write an adapter whose every tensor matters, as peft saves it."""
    model = getattr(hf, cls).from_pretrained(checkpoint, dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **options}))
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                spread = 0.2 if "lora_" in name and "magnitude" not in name else 0.05
                parameter.add_(spread * torch.randn(parameter.shape, generator=random))
    adapted.save_pretrained(root)
    return root


def unmerged(checkpoint: Path, cls: str, adapters: Sequence[Path], weights: Sequence[float] = (1.0,)) -> Any:
    """Return peft's model with the adapters loaded beside the weights."""
    model = getattr(hf, cls).from_pretrained(checkpoint, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, adapters[0], adapter_name="0")
    for number, root in enumerate(adapters[1:], 1):
        adapted.load_adapter(root, adapter_name=str(number))
    names = [str(number) for number in range(len(adapters))]
    adapted.base_model.set_adapter(names)
    for name, weight in zip(names, weights, strict=True):
        for module in adapted.modules():
            if hasattr(module, "set_scale") and name in getattr(module, "scaling", {}):
                module.set_scale(name, weight)
    return adapted.eval()


def merged(checkpoint: Path, adapters: Sequence[Path], weights: Sequence[float] = (1.0,)) -> Any:
    """Return transformers' model with the weights that mcpc merges."""
    loras = [Adapter.open(root, weight) for root, weight in zip(adapters, weights, strict=True)]
    return _load(Exporter(Checkpoint.open(checkpoint), loras).checkpoint)


def inputs(cls: str) -> dict[str, Any]:
    random = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 80, (2, 9), generator=random)
    if cls == "GPT2LMHeadModel":
        return {"input_ids": ids}
    pixels = torch.randn((2, 3, 32, 32), generator=random)
    if cls == "LlavaForConditionalGeneration":
        ids = torch.cat([ids, torch.full((2, 16), tiny.IMAGE_ID), ids], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def distance(cls: str, ours: Any, theirs: Any) -> float:
    name = "logits_per_image" if cls == "CLIPModel" else "logits"
    with torch.no_grad():
        return float((ours(**inputs(cls))[name] - theirs(**inputs(cls))[name]).abs().max())
