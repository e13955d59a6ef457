"""What the builder's log says: planned memory per profile, and the report of the finished engine.

TensorRT-RTX logs these figures without a GPU; they equal those inside the plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_PROFILE = re.compile(r"Constructing optimization profile number (\d+) \[\d+/\d+\]")
_FIGURE = re.compile(r"^(Max Scratch|Total Activation|Total Weights) Memory: (\d+) bytes$")
_REPORT = "Layers:"
#: A machine without a GPU adds this to every message that touches the driver.
_NO_DRIVER = "cudaError 35"


@dataclass
class BuildFigures:
    """Collects the figures of one build, line by line.

    Attributes:
        weights_bytes: Bytes of constants that the plan holds; None until the builder says it.
        profiles: Profile index -> {"activation": bytes, "scratch": bytes}; the largest over the chips.
        report: The engine's layers and I/O tensors, as text.
        warnings: Warnings, each once.
        errors: Errors without the noise of a machine that has no GPU.
    """

    weights_bytes: int | None = None
    profiles: dict[int, dict[str, int]] = field(default_factory=dict)
    report: str = ""
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _profile: int = 0

    def add(self, severity: int, message: str) -> None:
        """Take one log line. Severities: 0 internal error, 1 error, 2 warning, 3 info, 4 verbose."""
        if severity <= 1 and _NO_DRIVER not in message:
            self.errors.append(message)
        elif severity == 2 and message not in self.warnings:
            self.warnings.append(message)
        if message.startswith(_REPORT):
            self.report = message
        elif found := _PROFILE.search(message):
            self._profile = int(found[1])
        elif found := _FIGURE.match(message):
            self._figure(found[1], int(found[2]))

    def _figure(self, name: str, size_bytes: int) -> None:
        if name == "Total Weights":
            self.weights_bytes = size_bytes
            return
        figures = self.profiles.setdefault(self._profile, {})
        key = "scratch" if name == "Max Scratch" else "activation"
        figures[key] = max(size_bytes, figures.get(key, 0))
