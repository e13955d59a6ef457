"""The PyTorch reference: the checkpoint's own model, weights widened to float32, run by transformers itself.

Its weights are loaded by transformers' loader, not by mcpc's key map, so that a wrong map shows as a difference.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
import transformers

from mcpc.checkpoint import Checkpoint
from mcpc.core.runner import Array, Feeds
from mcpc.errors import BadInputError, InternalError
from mcpc.export.components import make_wrapper
from mcpc.export.skeleton import load_config, model_class
from mcpc.export.state import float32_tensor, state_dict
from mcpc.export.streaming import streaming_model
from mcpc.templates.plan import ExportPlan, PlannedComponent


class TorchReference:
    """A checkpoint as a float32 PyTorch model.

    Args:
        checkpoint: What to run.
        plan: Its components.
        streamed: Leave large weights on disk until a module needs them; their names then come from mcpc's key map.
    """

    def __init__(self, checkpoint: Checkpoint, plan: ExportPlan, streamed: bool = False) -> None:
        self.plan = plan
        self.model = streaming_model(checkpoint) if streamed else _load(checkpoint)
        if (checkpoint.root / "generation_config.json").is_file():
            self.model.generation_config = transformers.GenerationConfig.from_pretrained(
                str(checkpoint.root), local_files_only=True
            )
        self._checkpoint = checkpoint
        self._streamed = streamed

    def component(self, component: str) -> TorchRunner:
        """Return a runner of one component; the runner factory of a package comparison."""
        planned = next(item for item in self.plan.components if item.name == component)
        return TorchRunner(self.model, planned, self.plan, torch.float32)

    def exact_component(self, component: str) -> TorchRunner:
        """Return a runner of one component in float64, the judge of rounding."""
        planned = next(item for item in self.plan.components if item.name == component)
        return TorchRunner(self._exact, planned, self.plan, torch.float64)

    @cached_property
    def _exact(self) -> transformers.PreTrainedModel:
        if self._streamed:
            return streaming_model(self._checkpoint, torch.float64)
        return copy.deepcopy(self.model).double()

    def forward(self, feeds: Feeds) -> dict[str, Array]:
        """Run the model's own forward and return its tensor outputs by name."""
        names = {"decoder_input_ids": self._decoder_tokens}
        inputs: dict[str, Any] = {names.get(name, name): value for name, value in self._own_inputs(feeds).items()}
        if self._streamed and any(component.role == "decoder" for component in self.plan.components):
            inputs["use_cache"] = False  # nothing reads the cache, which fills memory
        with torch.no_grad():
            output = self.model(**inputs, return_dict=True)
        return {name: value.numpy() for name, value in output.items() if isinstance(value, torch.Tensor)}

    def _own_inputs(self, feeds: Feeds) -> dict[str, torch.Tensor]:
        """Return the inputs as the model's own forward takes them: one prompt, its items perhaps apart."""
        tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in feeds.items()}
        for modality in self.plan.template.modalities.values():
            if modality.batched:
                tensors |= {name: tensors[name].unsqueeze(0) for name in modality.inputs if name in tensors}
        return tensors

    @property
    def _decoder_tokens(self) -> str:
        """Return what the model's forward calls the decoder's tokens; BLIP has no encoder that would read others."""
        parameters = inspect.signature(self.model.forward).parameters
        return "decoder_input_ids" if "decoder_input_ids" in parameters else "input_ids"

    def generate(self, feeds: Feeds, new_tokens: int) -> list[int]:
        """Return exactly `new_tokens` greedy tokens of the model's own `generate`, past the end of text too."""
        model = self.model
        if not isinstance(model, transformers.GenerationMixin):
            raise InternalError("the model cannot generate", where=type(model).__name__)
        tensors = self._own_inputs(feeds)
        config = copy.deepcopy(model.generation_config)
        unreachable = self.plan.sizes["vocabulary"]  # None would be filled from the model's config again
        config.update(
            eos_token_id=unreachable, max_length=None, max_new_tokens=new_tokens, do_sample=False, num_beams=1
        )
        with torch.no_grad():
            sequence = model.generate(**tensors, generation_config=config)
        return [int(token) for token in sequence[0, tensors["input_ids"].shape[1] :]]

    def answer(self, feeds: Feeds, start: Sequence[int], new_tokens: int) -> list[int]:
        """Return exactly `new_tokens` greedy tokens of an encoder-decoder model, past the end of text too.

        `generate` of these models stops at the end of text, so this is the forward without any cache, under the
        model's own logits processors.

        Args:
            feeds: The model's own inputs; the first row is answered.
            start: Tokens that the decoder starts from.
            new_tokens: How many tokens.
        """
        config = self.model.generation_config
        processors = transformers.LogitsProcessorList()
        if config.suppress_tokens:
            processors.append(transformers.SuppressTokensLogitsProcessor(config.suppress_tokens))
        if config.begin_suppress_tokens:
            processors.append(
                transformers.SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, len(start))
            )
        ids = torch.tensor([list(start)])
        with torch.no_grad():
            inputs: dict[str, Any] = {
                name: torch.from_numpy(np.ascontiguousarray(value[:1])) for name, value in feeds.items()
            }
            encoded: list[Any] = []
            hook = self.model.get_encoder().register_forward_hook(
                lambda _, __, output: encoded.append(copy.deepcopy(output))
            )
            for _ in range(new_tokens):
                output = self.model(**inputs, **{self._decoder_tokens: ids}, use_cache=False)
                if encoded and "encoder_outputs" in inspect.signature(self.model.forward).parameters:
                    inputs = {name: value for name, value in inputs.items() if name == "attention_mask"}
                    inputs["encoder_outputs"] = copy.deepcopy(encoded[0])  # a decoder may write into it
                logits = output.logits[:, -1]
                scores = processors(cast(torch.LongTensor, ids), logits)
                ids = torch.cat([ids, scores.argmax(dim=-1, keepdim=True)], dim=1)
            hook.remove()
        return [int(token) for token in ids[0, len(start) :]]

    def watch(self, names: Sequence[str], run: Callable[[], Any]) -> dict[str, Array]:
        """Return the last output of each named module while `run` runs."""
        seen: dict[str, Array] = {}
        modules: Mapping[str, torch.nn.Module] = dict(self.model.named_modules())
        handles = [modules[name].register_forward_hook(_recorder(name, seen)) for name in names if name in modules]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
        return seen


def _recorder(name: str, seen: dict[str, Array]) -> Callable[..., None]:
    def record(module: torch.nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            seen[name] = output.detach().to(torch.float32).numpy().copy()

    return record


def _load(checkpoint: Checkpoint) -> transformers.PreTrainedModel:
    cls = model_class(checkpoint.architecture)
    try:
        model: transformers.PreTrainedModel = cls.from_pretrained(
            None, config=load_config(checkpoint.root), state_dict=state_dict(checkpoint), dtype=torch.float32
        )
    except Exception as error:
        raise BadInputError(
            "transformers cannot load the checkpoint",
            where=str(checkpoint.root),
            got=f"{type(error).__name__}: {error}",
        ) from error
    with torch.no_grad():
        for parameter, made in checkpoint.merged.items():
            model.get_parameter(parameter).copy_(float32_tensor(checkpoint, made))
    model.eval()
    return model


class TorchRunner:
    """Runs one component of the reference in PyTorch."""

    def __init__(
        self, model: transformers.PreTrainedModel, component: PlannedComponent, plan: ExportPlan, dtype: torch.dtype
    ) -> None:
        self._component = component
        self._dtype = dtype
        self._wrapper = make_wrapper(model, component, plan)

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Return the named outputs, as numpy arrays of the model's float dtype."""
        tensors = [self._tensor(feeds[spec.name]) for spec in self._component.inputs]
        with torch.no_grad():
            values = self._wrapper.eager(
                dict(zip([spec.name for spec in self._component.inputs], tensors, strict=True))
            )
        named = {spec.name: value.numpy() for spec, value in zip(self._component.outputs, values, strict=True)}
        return named if outputs is None else {name: named[name] for name in outputs}

    def _tensor(self, array: Array) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor
