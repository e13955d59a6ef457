"""Packages answer as PyTorch does, over the whole beds: 2,000 images and 200 questions."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from mcpc.backends.ort import package_runners
from mcpc.core.runner import Array
from mcpc.inference import DualEncoder, VisionLanguage
from mcpc.package import Package
from mcpc.processing.text import TextProcessor

CLASSES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
QUESTIONS = ("What is this?", "Name the item.", "Where is it worn?", "Describe the image.", "Is it footwear?")
NEW_TOKENS = 28


def pixel_values_of(assets: Path, count: int) -> Array:
    """Return the first test images as pixel values [count, 3, 32, 32]: padded by 2, mean and deviation 0.5."""
    with gzip.open(assets / "data" / "fashion-mnist" / "t10k-images-idx3-ubyte.gz") as file:
        raw = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)[:count]
    padded = np.pad(raw.astype(np.float32) / 255, ((0, 0), (2, 2), (2, 2)))
    return np.repeat(((padded - 0.5) / 0.5)[:, None], 3, axis=1)


@pytest.mark.slow
def test_clip_choices(clip_package: Path, fashion_clip: Path, assets: Path) -> None:
    """Zero-shot choices on 2,000 images equal PyTorch's, and are right as often as the checkpoint's card says."""
    import torch
    from transformers import CLIPModel

    pixels = pixel_values_of(assets, 2000)
    manifest = Package.open(clip_package).manifest
    ids, mask = TextProcessor.open(clip_package, manifest).batch([f"a photo of a {name}" for name in CLASSES])
    model = DualEncoder(manifest, package_runners(clip_package, manifest))
    texts = model.encode_texts({"input_ids": ids, "attention_mask": mask})
    logits = model.scores(model.encode_images({"pixel_values": pixels}), texts)
    reference = CLIPModel.from_pretrained(fashion_clip, dtype=torch.float32).eval()
    with torch.no_grad():
        tensors = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}
        expected = reference(
            **{name: torch.from_numpy(value) for name, value in tensors.items()}
        ).logits_per_image.numpy()
    assert int((logits.argmax(1) == expected.argmax(1)).sum()) == 2000
    assert np.abs(logits - expected).max() <= 1e-4
    with gzip.open(assets / "data" / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)[:2000]
    assert (logits.argmax(1) == labels).mean() > 0.8


@pytest.mark.slow
def test_llava_answers(llava_package: Path, fashion_llava: Path, assets: Path) -> None:
    """200 (image, question) pairs: greedy answers are identical token by token."""
    import torch
    from transformers import LlavaForConditionalGeneration

    pixels = pixel_values_of(assets, 200)
    manifest = Package.open(llava_package).manifest
    text = TextProcessor.open(llava_package, manifest)
    chain = VisionLanguage(manifest, package_runners(llava_package, manifest))
    reference = LlavaForConditionalGeneration.from_pretrained(fashion_llava, dtype=torch.float32).eval()
    prompts = [text.prompt_ids(question, images=1) for question in QUESTIONS]
    right = 0
    for number, image in enumerate(pixels):
        ids = prompts[number % len(prompts)]
        answer = [step.token for step in chain.greedy(ids, image[None], max_new_tokens=NEW_TOKENS)]
        tokens = torch.tensor([ids])
        with torch.no_grad():
            sequence = reference.generate(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), pixel_values=torch.from_numpy(image[None]),
                do_sample=False, max_new_tokens=NEW_TOKENS,
            )  # fmt: skip
        right += answer == sequence[0, len(ids) :].tolist()
    assert right == 200
