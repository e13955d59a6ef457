"""Train the two example checkpoints on Fashion-MNIST: a CLIP, then a LLaVA on top of its vision tower.

    python examples/train_fashion.py clip  --data FOLDER --output out/fashion-clip
    python examples/train_fashion.py llava --data FOLDER --output out/fashion-llava --clip out/fashion-clip

FOLDER holds the four `*-ubyte.gz` files of Fashion-MNIST (MIT licence, Zalando SE). Training takes minutes on a CPU.
A run gives a checkpoint of the same shape and about the same accuracy as the one in this folder, not the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the name that every PyTorch reader knows)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

CLASSES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
WORN = ("on the torso", "on the legs", "on the torso", "on the whole body", "on the torso", "on the feet",
        "on the torso", "on the feet", "in the hand", "on the feet")  # fmt: skip
FOOTWEAR = {"sandal", "sneaker", "ankle boot"}
CAPTIONS = ("a photo of a {}", "a picture of a {}", "a grey photo of a {}", "this is a {}", "a small image of a {}",
            "one {} on a black background")  # fmt: skip
PROMPT = "USER: <image>\n{} ASSISTANT:"
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<image>")
PAD, BOS, EOS, _, IMAGE = range(5)
IMAGE_TOKENS = 16
IGNORED = -100
IMAGE_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor", "do_convert_rgb": True, "do_resize": True,
    "size": {"height": 32, "width": 32}, "resample": 3, "do_center_crop": False, "do_rescale": True,
    "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
LLAVA_PROCESSOR = {
    "processor_class": "LlavaProcessor", "image_token": "<image>", "patch_size": 8, "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
}  # fmt: skip


@dataclass(frozen=True)
class Split:
    """Images [N,28,28] uint8 and labels [N] int64."""

    images: Tensor
    labels: Tensor

    @classmethod
    def read(cls, folder: Path, name: str) -> Split:
        with gzip.open(folder / f"{name}-images-idx3-ubyte.gz") as file:
            images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)
        with gzip.open(folder / f"{name}-labels-idx1-ubyte.gz") as file:
            labels = np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int64)
        return cls(torch.tensor(images), torch.tensor(labels))


def pixel_values(images: Tensor) -> Tensor:
    """Pad [B,28,28] uint8 to 32x32 and normalize it to [B,3,32,32] in -1..1."""
    padded = F.pad(images.float().div(255), (2, 2, 2, 2)).unsqueeze(1)
    return ((padded - 0.5) / 0.5).expand(-1, 3, -1, -1)


def answers(item: str, worn: str) -> dict[str, str]:
    """Return {question: answer} for one class."""
    return {
        "What is this?": f"It is a {item}.",
        "Name the item.": item,
        "Where is it worn?": f"It is worn {worn}.",
        "Describe the image.": f"A grey photo of a {item} on a black background, worn {worn}.",
        "Is it footwear?": "Yes." if item in FOOTWEAR else "No.",
    }


ANSWERS = [answers(item, worn) for item, worn in zip(CLASSES, WORN, strict=True)]
QUESTIONS = tuple(ANSWERS[0])


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on every caption, question and answer."""
    corpus = [caption.format(item) for caption in CAPTIONS for item in CLASSES]
    corpus += [f"USER: \n{question} ASSISTANT: {answer}" for table in ANSWERS for question, answer in table.items()]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"}, padding_side="right", model_max_length=128,
    )  # fmt: skip


class Schedule:
    """AdamW with one learning-rate cycle and clipped gradients."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], peak: float, steps: int, beta2: float) -> None:
        self._parameters = parameters
        self._optimizer = torch.optim.AdamW(parameters, peak, weight_decay=0.05, betas=(0.9, beta2))
        self._cycle = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, peak, steps + 1, pct_start=0.1)

    def step(self, loss: Tensor) -> None:
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._cycle.step()


def augmented(pixels: Tensor) -> Tensor:
    """Flip a batch half of the time and shift it by up to two pixels."""
    if torch.rand(()) < 0.5:
        pixels = pixels.flip(-1)
    dy, dx = torch.randint(-2, 3, (2,)).tolist()
    return torch.roll(pixels, (dy, dx), (2, 3))


def train_clip(data: Path, epochs: int, batch: int = 256) -> tuple[CLIPModel, dict[str, object]]:
    """Train a 1.3M-parameter CLIP; return it with its zero-shot accuracy on the test images."""
    tokenizer = make_tokenizer()
    tower = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "projection_dim": 64}
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    text = {**tower, **ids, "vocab_size": len(tokenizer), "num_hidden_layers": 2, "max_position_embeddings": 32}
    vision = {**tower, "num_hidden_layers": 4, "image_size": 32, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))
    sentences = [[f"{caption.format(item)}</s>" for item in CLASSES] for caption in CAPTIONS]
    prompts = [tokenizer(lines, padding=True, return_tensors="pt") for lines in sentences]

    train, test = Split.read(data, "train"), Split.read(data, "t10k")
    steps = epochs * (len(train.labels) // batch)
    schedule = Schedule(list(model.parameters()), 1.5e-3, steps, 0.999)
    for rows in batches(len(train.labels), batch, epochs):
        prompt = prompts[int(torch.randint(len(prompts), ()))]
        out = model(
            input_ids=prompt.input_ids,
            attention_mask=prompt.attention_mask,
            pixel_values=augmented(pixel_values(train.images[rows])),
        )
        schedule.step(F.cross_entropy(out.logits_per_image, train.labels[rows]))

    model.eval()
    hits = 0
    with torch.no_grad():
        for images, labels in zip(test.images.split(500), test.labels.split(500), strict=True):
            out = model(**prompts[0], pixel_values=pixel_values(images))
            hits += int((out.logits_per_image.argmax(-1) == labels).sum())
    accuracy = hits / len(test.labels)
    return model, {
        "zero_shot_accuracy": accuracy,
        "prompt": CAPTIONS[0],
        "classes": CLASSES,
        "test_images": len(test.labels),
    }


def batches(count: int, batch: int, epochs: int) -> Iterator[Tensor]:
    """Yield shuffled row indices, whole batches only."""
    for _ in range(epochs):
        yield from (rows for rows in torch.randperm(count).split(batch) if len(rows) == batch)


def conversation(tokenizer: PreTrainedTokenizerFast, question: str, answer: str | None) -> tuple[list[int], list[int]]:
    """Return (token ids, labels) of one exchange; the image token is repeated once per feature row."""
    prompt = tokenizer(PROMPT.format(question)).input_ids
    at = prompt.index(IMAGE)
    prompt[at : at + 1] = [IMAGE] * IMAGE_TOKENS
    reply = tokenizer(f" {answer}</s>", add_special_tokens=False).input_ids if answer is not None else []
    return prompt + reply, [IGNORED] * len(prompt) + reply


def padded(rows: Sequence[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    """Return ids, mask and labels [B,S] of several exchanges, padded on the right."""

    def stack(values: Sequence[list[int]], fill: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in values], True, fill)

    ids = [row[0] for row in rows]
    mask = stack([[1] * len(row) for row in ids], 0)
    return {"input_ids": stack(ids, PAD), "attention_mask": mask, "labels": stack([row[1] for row in rows], IGNORED)}


def train_llava(
    data: Path, clip_folder: Path, steps: int, batch: int = 64
) -> tuple[LlavaForConditionalGeneration, dict[str, object]]:
    """Train a 4.3M-parameter LLaVA on a frozen CLIP vision tower; return it in bfloat16 with its exact-match rate."""
    clip = CLIPModel.from_pretrained(clip_folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(clip_folder)
    text = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
        tie_word_embeddings=False,
    )  # fmt: skip
    vision = CLIPVisionConfig.from_dict(clip.config.vision_config.to_dict())
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=IMAGE_TOKENS,
                         vision_feature_layer=-2, vision_feature_select_strategy="default")  # fmt: skip
    model = LlavaForConditionalGeneration(config)
    copy_tower(clip, model)
    model.model.vision_tower.requires_grad_(False)

    train = Split.read(data, "train")
    schedule = Schedule([p for p in model.parameters() if p.requires_grad], 2e-3, steps, 0.95)
    for _ in range(steps):
        rows = torch.randint(len(train.labels), (batch,))
        asked = [QUESTIONS[int(torch.randint(len(QUESTIONS), ()))] for _ in range(batch)]
        labels = train.labels[rows].tolist()
        pairs = [conversation(tokenizer, q, ANSWERS[label][q]) for q, label in zip(asked, labels, strict=True)]
        schedule.step(model(**padded(pairs), pixel_values=pixel_values(train.images[rows])).loss)

    model = model.bfloat16().float().eval()  # what is measured is what is stored: bfloat16, computed in float32
    metrics = exact_match(model, tokenizer, Split.read(data, "t10k"))
    return model.bfloat16(), metrics


def copy_tower(clip: CLIPModel, model: LlavaForConditionalGeneration) -> None:
    """Copy the vision tower's weights by name, whatever prefix each class gives them."""

    def plain(name: str) -> str:
        return name.split("vision_model.")[-1]

    source = {plain(name): value for name, value in clip.vision_model.state_dict().items()}
    tower = model.model.vision_tower
    tower.load_state_dict({name: source[plain(name)] for name in tower.state_dict()})


def exact_match(
    model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, test: Split
) -> dict[str, object]:
    """Return the rate of greedy answers that equal the expected text, over 200 images and every question."""
    rates = {}
    for question in QUESTIONS:
        hits = 0
        for images, labels in zip(test.images[:200].split(50), test.labels[:200].split(50), strict=True):
            inputs = padded([conversation(tokenizer, question, None)] * len(labels))
            inputs.pop("labels")
            with torch.no_grad():
                out = model.generate(**inputs, pixel_values=pixel_values(images), max_new_tokens=28, do_sample=False,
                                     eos_token_id=EOS, pad_token_id=PAD)  # fmt: skip
            said = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            hits += sum(
                text.strip() == ANSWERS[label][question] for text, label in zip(said, labels.tolist(), strict=True)
            )
        rates[question] = hits / 200
    mean = sum(rates.values()) / len(rates)
    return {"exact_match": mean, "per_question": rates, "questions": QUESTIONS, "classes": CLASSES, "worn": WORN,
            "prompt": PROMPT.format("{question}"), "computed": "bf16 weights widened to fp32, greedy"}  # fmt: skip


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("clip", "llava"))
    parser.add_argument("--data", type=Path, required=True, help="folder of the Fashion-MNIST files")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--clip", type=Path, help="llava: the trained CLIP")
    parser.add_argument("--epochs", type=int, default=6, help="clip: passes over the training images")
    parser.add_argument("--steps", type=int, default=2000, help="llava: training steps")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.model == "clip":
        model, metrics = train_clip(options.data, options.epochs)
        tokenizer, processor = make_tokenizer(), "CLIPProcessor"
    else:
        if options.clip is None:
            parser.error("llava needs --clip FOLDER")
        model, metrics = train_llava(options.data, options.clip, options.steps)
        tokenizer, processor = PreTrainedTokenizerFast.from_pretrained(options.clip), "LlavaProcessor"
    options.output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    write_json(options.output / "preprocessor_config.json", {**IMAGE_PROCESSOR, "processor_class": processor})
    if options.model == "llava":
        write_json(options.output / "processor_config.json", LLAVA_PROCESSOR)
    write_json(options.output / "metrics.json", metrics)
    print(json.dumps(metrics, indent=2))


if __name__ == "__main__":
    main()
