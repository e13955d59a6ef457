"""Run a package beside its reference and judge every output."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from mcpc.core.progress import Progress
from mcpc.core.runner import Array, RunnerFactory, outputs_of
from mcpc.errors import VerificationError
from mcpc.package import Manifest
from mcpc.verify.cases import Case, Cases, Sample, seeded_samples
from mcpc.verify.compare import Difference, Gate, compare, compare_whole_numbers, failures
from mcpc.verify.crossmodal import CrossModal, cross_modal
from mcpc.verify.parting import Parting

GREEDY_TOKENS = 32
#: How much is compared. `full`: every case, whole models in memory, 32 greedy tokens of every sample. `layers`: every
#: seeded case and one sample, the weights of one piece in memory at a time; each run reads all weights, so that the
#: tokens are those which the prompt's logits choose. `sample`: as `layers`, without the seeded cases.
Mode = Literal["full", "layers", "sample"]
#: Some inputs are ill-conditioned: there PyTorch's float32 is itself further from float64 than a gate allows. Then
#: float64 is the judge, and a candidate may be this many times further from it than PyTorch's float32 is; the factor
#: allows for kernels that sum in another order.
ROUNDING_FACTOR = 4.0
_DECADES_MIN = -12


class Chain(Protocol):
    """A whole model, whichever runtime runs it."""

    def logits(self, sample: Sample) -> Array:
        """Return logits [.., V] of the prompt, or [images, texts] of a dual encoder."""
        ...

    def cosines(self, sample: Sample) -> Array:
        """Return image-text cosine similarities [images, texts]; dual encoders only."""
        ...

    def greedy(self, sample: Sample, new_tokens: int) -> list[int]:
        """Return exactly `new_tokens` greedy tokens, past the end of text too."""
        ...


@dataclass
class ComponentResult:
    """The judgement of one component over all its cases."""

    name: str
    gate: Gate
    outputs: dict[str, Difference] = field(default_factory=dict)
    cases: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    arbitrated: dict[str, Arbitration] = field(default_factory=dict)


@dataclass(frozen=True)
class Arbitration:
    """A float output that missed its gate where the reference's own rounding is of that size.

    Attributes:
        reference_rounding: Largest distance of the float32 reference from itself in float64.
        distance: Largest distance of the candidate from the float64 reference.
    """

    reference_rounding: float
    distance: float

    def acceptable(self, gate: Gate) -> bool:
        """Return True when the candidate is not further from float64 than rounding explains."""
        return gate.max_abs is not None and self.distance <= max(
            gate.max_abs, ROUNDING_FACTOR * self.reference_rounding
        )


@dataclass
class ChainResult:
    """The judgement of the whole model on real samples."""

    gate: Gate
    logits: Difference | None = None
    greedy_equal: int = 0
    greedy_total: int = 0
    cross_modal: CrossModal | None = None
    samples: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass
class Verification:
    """Everything that was compared."""

    against: dict[str, str]
    components: list[ComponentResult]
    chain: ChainResult
    mode: Mode = "full"
    parting: Parting | None = None

    @property
    def passed(self) -> bool:
        """Return True when no comparison failed."""
        return not self.failures()

    def failures(self) -> list[str]:
        """Return every failed comparison, components in order, then the chain."""
        lines = [f"{item.name}: {reason}" for item in self.components for reason in item.failures]
        return lines + [f"chain: {reason}" for reason in self.chain.failures]

    def figures(self) -> dict[str, Any]:
        """Return the exact figures, for the report (they vary with the machine)."""
        return {
            "against": self.against,
            "mode": self.mode,
            "components": [
                {"name": c.name, "gate": _gate(c.gate), "cases": c.cases, "failures": c.failures,
                 "outputs": {name: asdict(difference) for name, difference in c.outputs.items()},
                 "arbitrated": {name: asdict(item) for name, item in c.arbitrated.items()}}
                for c in self.components
            ],
            "chain": {
                "gate": _gate(self.chain.gate), "samples": self.chain.samples, "failures": self.chain.failures,
                "logits": asdict(self.chain.logits) if self.chain.logits else None,
                "greedy_tokens": {"equal": self.chain.greedy_equal, "of": self.chain.greedy_total},
                "cross_modal": asdict(self.chain.cross_modal) if self.chain.cross_modal else None,
            },
        }  # fmt: skip

    def bounds(self) -> dict[str, Any]:
        """Return what `verification.json` holds: verdicts, gates, and figures rounded to the next worse decade.

        Exact figures differ in their last digits between machines; a decade does not, so that the file can be part
        of the package digest.
        """
        return {
            "against": self.against,
            "mode": self.mode,
            "verdict": "passed" if self.passed else "failed",
            "components": [
                {"name": c.name, "gate": _gate(c.gate), "cases": c.cases,
                 "outputs": {name: _decades(difference) for name, difference in c.outputs.items()},
                 "judged_by_float64": sorted(c.arbitrated)}
                for c in self.components
            ],
            "chain": {
                "gate": _gate(self.chain.gate), "samples": self.chain.samples,
                "logits": _decades(self.chain.logits) if self.chain.logits else None,
                "greedy_tokens": {"equal": self.chain.greedy_equal, "of": self.chain.greedy_total},
            },
        }  # fmt: skip


def _gate(gate: Gate) -> dict[str, float]:
    return {name: value for name, value in asdict(gate).items() if value is not None}


def _decade(value: float) -> float:
    """Return the next power of ten at or above a non-negative value; 0 stays 0."""
    if value <= 0.0:
        return 0.0
    return float(f"1e{max(math.ceil(math.log10(value)), _DECADES_MIN)}")


def _decades(difference: Difference) -> dict[str, float]:
    return {
        "max_abs_at_most": _decade(difference.max_abs),
        "max_rel_at_most": _decade(difference.max_rel),
        "cosine_distance_at_most": _decade(1 - difference.cosine),
        "worst_channel_cosine_distance_at_most": _decade(1 - difference.worst_channel_cosine),
        "cosine_distance_without_outliers_at_most": _decade(1 - difference.cosine_without_outliers),
    }


def verify(
    manifest: Manifest,
    candidate: RunnerFactory,
    reference: RunnerFactory,
    exact: RunnerFactory | None,
    gates: Mapping[str, Gate],
    chains: tuple[Chain, Chain],
    samples: Sequence[Sample],
    against: dict[str, str],
    mode: Mode,
    progress: Progress,
) -> Verification:
    """Compare every component on the same inputs, then the whole chain on real samples.

    Args:
        manifest: Of the candidate.
        candidate: Runs the candidate's components.
        reference: Runs the reference's components.
        exact: Runs them in float64, where the reference can; asked only when a float gate is missed.
        gates: Component name -> gate, decided beforehand.
        chains: Candidate and reference as whole models.
        samples: Real requests.
        against: What the reference is, for the record.
        mode: How much is compared.
        progress: Shows the cases.
    """
    results = {
        component.name: ComponentResult(component.name, gates[component.name]) for component in manifest.components
    }
    chosen = tuple(samples if mode == "full" else samples[:1])
    cases = Cases(manifest, reference, small=mode != "full").all(chosen, seeded=mode != "sample" or not chosen)
    for number, case in enumerate(cases):
        progress.advance(number, 0, f"{case.component}: {case.label}")
        _judge(case, candidate, reference, exact, results[case.component])
    loosest = _loosest(gates.values())
    requests = chosen or seeded_samples(manifest, reference)
    chain = _judge_chain(manifest, chains, requests, loosest, mode, progress)
    return Verification(against, list(results.values()), chain, mode)


def _loosest(gates: Iterable[Gate]) -> Gate:
    cosines = [gate.cosine for gate in gates if gate.cosine is not None]
    return Gate(cosine=min(cosines)) if cosines else max(gates, key=lambda gate: gate.max_abs or 0.0)


def _judge(
    case: Case, candidate: RunnerFactory, reference: RunnerFactory, exact: RunnerFactory | None, result: ComponentResult
) -> None:
    expected = case.expected or dict(reference(case.component).run(case.feeds))
    truth: dict[str, Array] | None = None
    result.cases.append(case.label)
    for name, actual in outputs_of(candidate(case.component), case.feeds):
        value = expected.pop(name)
        ours, theirs = case.masked(name, actual), case.masked(name, value)
        try:
            difference = compare(ours, theirs) if value.dtype.kind == "f" else compare_whole_numbers(ours, theirs)
        except VerificationError as error:
            result.failures.append(f"{name} ({case.label}): {error}")
            continue
        result.outputs[name] = difference.worst(result.outputs[name]) if name in result.outputs else difference
        reasons = failures(difference, result.gate)
        if reasons and exact is not None and result.gate.max_abs is not None:
            truth = truth or exact(case.component).run(case.feeds)
            judge = case.masked(name, truth[name])
            verdict = Arbitration(compare(theirs, judge).max_abs, compare(ours, judge).max_abs)
            result.arbitrated[f"{name} ({case.label})"] = verdict
            if verdict.acceptable(result.gate):
                continue
        result.failures += [f"{name} ({case.label}): {reason}" for reason in reasons]
    result.failures += [f"{name} ({case.label}): the package computes no such output" for name in expected]


def _judge_chain(
    manifest: Manifest,
    chains: tuple[Chain, Chain],
    samples: Sequence[Sample],
    gate: Gate,
    mode: Mode,
    progress: Progress,
) -> ChainResult:
    result = ChainResult(gate)
    actual, expected = chains
    for sample in samples:
        progress.advance(len(result.samples), len(samples), f"chain: {sample.label}")
        result.samples.append(sample.label)
        logits, reference_logits = actual.logits(sample), expected.logits(sample)
        try:
            difference = compare(logits, reference_logits)
        except VerificationError as error:
            result.failures.append(f"logits ({sample.label}): {error}")
            continue
        result.logits = difference.worst(result.logits) if result.logits else difference
        result.failures += [f"logits ({sample.label}): {reason}" for reason in failures(difference, gate)]
        if manifest.kind == "dual-encoder":
            figures = cross_modal(logits, reference_logits, actual.cosines(sample), expected.cosines(sample))
            result.cross_modal = _worst(figures, result.cross_modal)
            result.failures += [f"{reason} ({sample.label})" for reason in figures.failures()]
        elif mode != "full":
            chosen = logits.argmax(axis=-1) == reference_logits.argmax(axis=-1)
            result.greedy_equal += int(chosen.sum())
            result.greedy_total += chosen.size
        else:
            _judge_greedy(
                result, actual.greedy(sample, GREEDY_TOKENS), expected.greedy(sample, GREEDY_TOKENS), sample, gate
            )
    return result


def _worst(a: CrossModal, b: CrossModal | None) -> CrossModal:
    return a if b is None else CrossModal(max(a.kl_divergence, b.kl_divergence), max(a.cosine_gap, b.cosine_gap))


def _judge_greedy(result: ChainResult, actual: list[int], expected: list[int], sample: Sample, gate: Gate) -> None:
    """Count agreeing tokens; a float package must agree on all of them."""
    equal = sum(a == b for a, b in zip(actual, expected, strict=False))
    result.greedy_equal += equal
    result.greedy_total += len(expected)
    if gate.max_abs is not None and (actual != expected):
        result.failures.append(f"greedy tokens ({sample.label}): {equal} of {len(expected)} agree")
