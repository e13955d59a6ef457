"""`mcpc run` says what PyTorch says, and refuses with one clear line what does not suit the package."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcpc.backends.ort import package_runners
from mcpc.cli.run import run as command
from mcpc.core.progress import Silent
from mcpc.errors import BadInputError, McpcError, UnsupportedError, UsageError
from mcpc.inference import Seq2Seq, VisionLanguage
from mcpc.package import Package, PackageWriter
from mcpc.processing.audio import load_audio
from mcpc.processing.images import load_images
from mcpc.processing.text import TextProcessor
from mcpc.workflows.run import Request, run

QUESTIONS = ("What is this?", "Name the item.", "Where is it worn?", "Describe the image.", "Is it footwear?")
NEW_TOKENS = 28
LOGITS_MAX_ABS = 1e-4
END_OF_TEXT = 50256  # of Whisper's English tokenizer; larger ids are special


def ask(package: Path, request: Request, **options: Any) -> dict[str, Any]:
    """Return the report's data, with the streamed pieces under `pieces`."""
    pieces: list[str] = []
    settings: dict[str, Any] = {"allow_unverified": True, "on_text": pieces.append, "progress": Silent()} | options
    return {**run(package, request, **settings).data, "pieces": pieces}


@pytest.mark.slow
def test_llava_answers_equal_pytorch(llava_package: Path, fashion_llava: Path, example_images: dict[str, Path]) -> None:
    """50 questions: the prompt, the pixels, the tokens and the text against transformers' own."""
    import torch
    from PIL import Image
    from transformers import AutoTokenizer, LlavaForConditionalGeneration
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    config = json.loads((fashion_llava / "preprocessor_config.json").read_text())
    settings = {key: value for key, value in config.items() if not key.endswith(("_type", "_class"))}
    processor = CLIPImageProcessorPil(**settings)
    tokenizer = AutoTokenizer.from_pretrained(fashion_llava)
    model = LlavaForConditionalGeneration.from_pretrained(fashion_llava, dtype=torch.float32).eval()
    manifest = Package.open(llava_package).manifest
    chain = VisionLanguage(manifest, package_runners(llava_package, manifest))
    text = TextProcessor.open(llava_package, manifest)
    for path in example_images.values():
        for question in QUESTIONS:
            prompt = f"USER: <image>\n{question} ASSISTANT:".replace("<image>", "<image>" * 16)
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])
            pixels = processor(images=[Image.open(path)], return_tensors="pt")["pixel_values"]
            expected = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, do_sample=False,
                max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
            own_pixels = load_images([path], manifest.modalities["image"])
            steps = list(chain.greedy(text.prompt_ids(question, 1), own_pixels, max_new_tokens=NEW_TOKENS))
            tokens = [step.token for step in steps]
            assert tokens == expected.sequences[0, ids.shape[1] :].tolist()
            for step, logits in zip(steps, expected.logits, strict=True):
                assert np.abs(step.logits - logits[0].numpy()).max() <= LOGITS_MAX_ABS
            assert text.decode(tokens) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_left_padded_prompts_answer_as_they_do_alone(llava_package: Path, example_images: dict[str, Path]) -> None:
    manifest = Package.open(llava_package).manifest
    chain = VisionLanguage(manifest, package_runners(llava_package, manifest))
    text = TextProcessor.open(llava_package, manifest)
    prompts = [text.prompt_ids(question, 1) for question in ("Describe the image.", "Is it footwear or a bag?")]
    pixels = load_images([example_images["bag"], example_images["sandal"]], manifest.modalities["image"])
    alone = [list(chain.greedy(ids, pixels[row : row + 1], max_new_tokens=8)) for row, ids in enumerate(prompts)]

    width = max(len(ids) for ids in prompts) + 3
    assert len({len(ids) for ids in prompts}) == 2
    ids = np.array([[0] * (width - len(prompt)) + prompt for prompt in prompts], np.int64)
    mask = np.array([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], np.int64)
    decoder, logits = chain.prefill(ids, pixels, mask)
    last = logits[:, -1]
    for index in range(min(len(steps) for steps in alone)):
        for row in range(2):
            assert np.abs(last[row] - alone[row][index].logits).max() <= LOGITS_MAX_ABS
        last = chain.advance(decoder, [alone[row][index].token for row in range(2)])


def test_a_prompt_in_two_pieces_is_the_whole_prompt(llava_package: Path, example_images: dict[str, Path]) -> None:
    manifest = Package.open(llava_package).manifest
    chain = VisionLanguage(manifest, package_runners(llava_package, manifest))
    ids = np.array([TextProcessor.open(llava_package, manifest).prompt_ids("Name the item.", 1)])
    pixels = load_images([example_images["coat"]], manifest.modalities["image"])
    _, whole = chain.prefill(ids, pixels)
    embeds = chain.embed(ids, chain.image_features(pixels))
    decoder, first = chain.prefill(ids[:, :1], None)
    pieces = [first, *(decoder.step("inputs_embeds", embeds[:, a:b]) for a, b in ((1, 9), (9, ids.shape[1])))]
    assert np.abs(np.concatenate(pieces, axis=1) - whole).max() <= LOGITS_MAX_ABS


def test_placeholders_and_features_must_match(llava_package: Path, example_images: dict[str, Path]) -> None:
    manifest = Package.open(llava_package).manifest
    chain = VisionLanguage(manifest, package_runners(llava_package, manifest))
    ids = TextProcessor.open(llava_package, manifest).prompt_ids("Name the item.", 1)
    pixels = load_images([example_images["coat"]], manifest.modalities["image"])
    for wrong in (ids[:6] + ids[7:], [*ids, 4]):
        with pytest.raises(BadInputError, match="do not match the image features"):
            list(chain.greedy(wrong, pixels, max_new_tokens=1))


def test_an_answer_is_streamed(llava_package: Path, example_images: dict[str, Path]) -> None:
    data = ask(llava_package, Request(images=(example_images["bag"],), prompt="Describe the image."))
    assert data["text"] == "".join(data["pieces"]) == "A grey photo of a bag on a black background, worn in the hand."
    assert len(data["pieces"]) > 5
    assert data["finish"] == "eos"
    assert data["package_checked"] == "none"
    assert set(data["timings"]) == {"load_ms", "prefill_ms", "step_ms_median", "tokens_per_s"}
    short = ask(llava_package, Request(images=(example_images["bag"],), prompt="Describe the image.", max_new_tokens=3))
    assert short["tokens"] == data["tokens"][:3]
    assert short["finish"] == "length"


def test_an_answer_without_an_image(llava_package: Path) -> None:
    data = ask(llava_package, Request(prompt="Is it footwear?", max_new_tokens=4))
    assert 0 < len(data["tokens"]) <= 4


def test_clip_scores_equal_pytorch(clip_package: Path, fashion_clip: Path, example_images: dict[str, Path]) -> None:
    import torch
    from transformers import AutoTokenizer, CLIPModel

    texts = tuple(f"a photo of a {name.replace('-', ' ')}" for name in example_images)
    data = ask(clip_package, Request(images=tuple(example_images.values()), texts=texts))

    pixels = load_images(list(example_images.values()), Package.open(clip_package).manifest.modalities["image"])
    tokens = AutoTokenizer.from_pretrained(fashion_clip)(
        [text + "</s>" for text in texts], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        expected = CLIPModel.from_pretrained(fashion_clip, dtype=torch.float32).eval()(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            pixel_values=torch.from_numpy(pixels),
        )
    assert np.abs(np.array(data["logits"]) - expected.logits_per_image.numpy()).max() <= LOGITS_MAX_ABS
    chances = expected.logits_per_image.softmax(dim=1).numpy()
    assert np.abs(np.array(data["probabilities"]) - chances).max() <= 1e-5


@pytest.mark.slow
def test_transcripts_equal_pytorch(whisper_package: Path, assets: Path) -> None:
    import torch
    from transformers import WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(
        assets / "checkpoints" / "whisper-tiny.en", dtype=torch.float32
    ).eval()
    manifest = Package.open(whisper_package).manifest
    chain = Seq2Seq(manifest, package_runners(whisper_package, manifest))
    clips = sorted((assets / "data" / "speech").glob("*.wav"))
    assert len(clips) == 11
    for clip in clips:
        features = load_audio(clip, manifest.modalities["audio"])
        tokens = [step.token for step in chain.greedy({"input_features": features}, max_new_tokens=200)]
        sequence = model.generate(torch.from_numpy(features), do_sample=False, num_beams=1)[0].tolist()
        assert tokens[:-1] == [token for token in sequence if token < END_OF_TEXT]
        assert tokens[-1] == END_OF_TEXT
    assert ask(whisper_package, Request(audio=clips[5]))["text"] == "Go forward 10 meters."


Edit = Callable[[dict[str, Any]], None]


def altered(package: Path, target: Path, edit: Edit) -> Path:
    """Copy a package, edit its manifest and seal it again."""
    shutil.copytree(package, target)
    document = json.loads((target / "manifest.json").read_text())
    edit(document)
    (target / "manifest.json").write_text(json.dumps(document))
    PackageWriter(target).seal()
    return target


def test_the_answer_ends_with_the_context(llava_package: Path, example_images: dict[str, Path], tmp_path: Path) -> None:
    request = Request(images=(example_images["bag"],), prompt="Describe the image.")
    length = ask(llava_package, request)["prompt_tokens"]

    def context(room: int) -> Path:
        return altered(
            llava_package, tmp_path / str(room), lambda document: document["binding"].update(max_tokens=length + room)
        )

    assert len(ask(context(2), request)["tokens"]) == 2
    with pytest.raises(BadInputError, match="no room"):
        ask(context(0), request)
    with pytest.raises(BadInputError, match="too long"):
        ask(context(-1), request)


def test_an_undeclared_modality_is_refused(
    llava_package: Path, example_images: dict[str, Path], tmp_path: Path
) -> None:
    def edit(document: dict[str, Any]) -> None:
        del document["modalities"]["image"]
        document["binding"]["placeholders"] = {}

    package = altered(llava_package, tmp_path / "p", edit)
    with pytest.raises(BadInputError, match="declares no image input"):
        ask(package, Request(images=(example_images["bag"],), prompt="What is this?"))


def test_a_package_of_plain_graphs_is_refused(llava_package: Path, tmp_path: Path) -> None:
    package = altered(llava_package, tmp_path / "p", lambda document: document.update(kind="onnx"))
    with pytest.raises(UnsupportedError, match="cannot be run"):
        ask(package, Request(prompt="What is this?"))


def test_requests_that_do_not_suit_the_package(
    llava_package: Path, clip_package: Path, example_images: dict[str, Path], tmp_path: Path
) -> None:
    image = (example_images["bag"],)
    text_file = tmp_path / "notes.png"
    text_file.write_text("no image")
    cases: list[tuple[Path, Request, type[McpcError], str]] = [
        (llava_package, Request(audio=tmp_path / "a.wav", prompt="x"), UsageError, "takes no --audio"),
        (llava_package, Request(images=image, texts=("a",)), UsageError, "takes no --text"),
        (llava_package, Request(images=image), UsageError, "needs --prompt"),
        (llava_package, Request(images=image, prompt=" "), UsageError, "blank"),
        (llava_package, Request(images=image, prompt="a <image>"), BadInputError, "placeholders do not match"),
        (llava_package, Request(images=image, prompt="what " * 600), BadInputError, "too long"),
        (llava_package, Request(images=(text_file,), prompt="x"), BadInputError, "does not accept this type"),
        (clip_package, Request(images=image, prompt="x"), UsageError, "takes no --prompt"),
        (clip_package, Request(images=image), UsageError, "needs --text"),
        (clip_package, Request(texts=("a",)), UsageError, "needs --image"),
        (clip_package, Request(images=image, texts=("a",), max_new_tokens=3), UsageError, "takes no --max-new-tokens"),
        (clip_package, Request(images=image, texts=("a", "")), UsageError, "blank"),
        (clip_package, Request(images=image, texts=("photo " * 40,)), BadInputError, "too long"),
    ]
    for package, request, kind, text in cases:
        with pytest.raises(kind, match=text) as caught:
            ask(package, request)
        assert "\n" not in str(caught.value)


def test_an_unverified_package_must_be_allowed(llava_package: Path) -> None:
    with pytest.raises(UsageError, match="unverified") as caught:
        ask(llava_package, Request(prompt="x"), allow_unverified=False)
    assert "--allow-unverified" in caught.value.hint


def test_a_damaged_package_is_refused(clip_package: Path, example_images: dict[str, Path], tmp_path: Path) -> None:
    package = tmp_path / "p"
    shutil.copytree(clip_package, package)
    weights = next((package / "weights").iterdir())
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(BadInputError, match="wrong size"):
        ask(package, Request(images=(example_images["bag"],), texts=("a",)))


def test_the_command_prints_text_or_one_json_document(
    llava_package: Path, example_images: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def call(json_output: bool) -> str:
        command(llava_package, [example_images["bag"]], "What is this?", allow_unverified=True, json_output=json_output)
        return capsys.readouterr().out

    text = call(json_output=False)
    document = json.loads(call(json_output=True))
    assert text == document["text"] + "\n"
    assert document["command"] == "run"
    assert document["finish"] == "eos"


def test_the_command_prints_a_table_of_scores(
    clip_package: Path, example_images: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    images = [example_images["bag"], example_images["dress"]]
    texts = ["a photo of a bag", "a photo of a dress"]
    command(clip_package, images, text=texts, allow_unverified=True)
    best = [line for line in capsys.readouterr().out.splitlines() if line.rstrip().endswith("best")]
    assert len(best) == 2
    for line, text in zip(best, texts, strict=True):
        assert text in line


def test_the_command_exits_with_the_code_of_the_error(clip_package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command(clip_package, None, "hello", allow_unverified=True)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: a dual-encoder package takes no --prompt")
