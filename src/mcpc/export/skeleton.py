"""Build a transformers model from its config alone: parameters without bytes, computed buffers real.

Parameters live on the meta device while the model is built and become FakeTensors for tracing, so that
neither time nor memory depends on the weights. Buffers (rotary frequencies, position ids) are computed by
the constructor and are small, so they stay real.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # mcpc never goes online
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import modeling_utils

from mcpc.errors import BadInputError, UnsupportedError
from mcpc.export.rope import check_rope

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
logging.getLogger("torch.onnx").setLevel(logging.ERROR)
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it prints what it raises as well
warnings.filterwarnings("ignore", module=r"(torch|onnxscript|copyreg)")

TORCH_DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn, "float8_e8m0fnu": torch.float8_e8m0fnu,
    "int64": torch.int64, "int32": torch.int32, "int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip


def load_config(root: Path) -> transformers.PretrainedConfig:
    """Return the full config of a checkpoint, defaults included.

    Raises:
        BadInputError: transformers cannot read it, or reads something else than it says.
        UnsupportedError: Its rotary embedding is not computed.
    """
    try:
        config: transformers.PretrainedConfig = transformers.AutoConfig.from_pretrained(
            str(root), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # noqa: BLE001 (transformers raises bare KeyError, ValueError, ... for a bad config)
        raise BadInputError(
            "transformers cannot read the config",
            where=str(root / "config.json"),
            got=f"{type(error).__name__}: {_line(error)}",
        ) from None
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None and hasattr(part, "quantization_config"):
            del part.quantization_config  # the checkpoint is read dequantized: the model has plain layers
    check_rope(config, root)
    return config


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def model_class(architecture: str) -> type[transformers.PreTrainedModel]:
    """Return the transformers class of an architecture.

    Raises:
        UnsupportedError: The installed transformers has no such class.
    """
    found = getattr(transformers, architecture, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise UnsupportedError(
            f"transformers {transformers.__version__} has no {architecture}", where="config.json: architectures"
        )
    return found


def build_skeleton(root: Path, architecture: str, dtype: str) -> transformers.PreTrainedModel:
    """Return the model with parameters on the meta device, in evaluation mode.

    Raises:
        BadInputError: The config does not describe a model that transformers can build.
    """
    config = load_config(root)
    cls = model_class(architecture)
    try:
        with _parameters_on_meta(), _no_initialisation():
            model: transformers.PreTrainedModel = cls._from_config(config, dtype=TORCH_DTYPES[dtype])
    except Exception as error:
        raise BadInputError("transformers cannot build the model of this config", where=str(root / "config.json"),
                            got=f"{type(error).__name__}: {_line(error)}") from error  # fmt: skip
    model.eval()
    return model


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move every parameter to meta as it is registered; buffers stay where they are computed."""
    original = torch.nn.Module.register_parameter

    def register(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        original(self, name, param)
        if param is not None and param.device.type != "meta":
            self._parameters[name] = torch.nn.Parameter(param.data.to("meta"), requires_grad=False)

    torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _no_initialisation() -> Iterator[None]:
    """Make every weight initialiser a no-op: the values would be thrown away.

    A temporary parameter from an empty factory is mapped lazily, so no page of it is ever touched.
    """
    names = [name for name in dir(torch.nn.init) if name.endswith("_") and not name.startswith("_")]
    saved = {name: getattr(torch.nn.init, name) for name in names}
    init_weights = modeling_utils.PreTrainedModel.init_weights
    for name in names:
        setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)
    modeling_utils.PreTrainedModel.init_weights = lambda self: self.tie_weights(recompute_mapping=False)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(torch.nn.init, name, function)
        modeling_utils.PreTrainedModel.init_weights = init_weights  # type: ignore[method-assign]


def make_fake(model: torch.nn.Module) -> FakeTensorMode:
    """Replace every parameter by a FakeTensor on the CPU, shared parameters staying shared."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twins: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in twins:
                with mode:
                    twin = torch.empty(param.shape, dtype=param.dtype)
                twins[id(param)] = torch.nn.Parameter(twin, requires_grad=False)
            module._parameters[name] = twins[id(param)]
    return mode


def config_dict(config: transformers.PretrainedConfig) -> dict[str, Any]:
    """Return the config as plain data, with values that transformers derives (such as head_dim) filled in."""
    data: dict[str, Any] = config.to_dict()
    for alias in config.attribute_map:
        data.setdefault(alias, getattr(config, alias, None))
    for name in config.sub_configs:
        sub = getattr(config, name, None)
        if sub is not None:
            data[name] = config_dict(sub)
    if "head_dim" not in data or data["head_dim"] is None:
        hidden, heads = data.get("hidden_size"), data.get("num_attention_heads")
        if isinstance(hidden, int) and isinstance(heads, int) and heads and hidden % heads == 0:
            data["head_dim"] = hidden // heads
    if data.get("num_key_value_heads") is None and isinstance(data.get("num_attention_heads"), int):
        data["num_key_value_heads"] = data["num_attention_heads"]
    return data
