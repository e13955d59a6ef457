"""How a verification reads on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def render_verification(console: Console, figures: dict[str, Any]) -> None:
    """Print one line per component with its worst figures and its gate, then the chain."""
    against = figures["against"]
    console.print(f"checked: executed, against the {against['kind']} {against.get('digest', '')[:19]}")
    table = Table(box=None, pad_edge=False)
    for heading in ("component", "cases", "max abs", "max rel", "cosine", "worst channel", "gate", ""):
        table.add_column(heading, justify="left" if heading in ("component", "") else "right")
    for component in figures["components"]:
        worst = _worst(list(component["outputs"].values()))
        table.add_row(
            component["name"],
            str(len(component["cases"])),
            *worst,
            _gate(component["gate"]),
            "failed" if component["failures"] else "ok",
        )
    chain = figures["chain"]
    if chain["logits"] is not None:
        table.add_row(
            "chain",
            str(len(chain["samples"])),
            *_worst([chain["logits"]]),
            _gate(chain["gate"]),
            "failed" if chain["failures"] else "ok",
        )
    console.print(table)
    greedy = chain["greedy_tokens"]
    if greedy["of"]:
        console.print(f"greedy tokens: {greedy['equal']} of {greedy['of']} agree")
    if chain["cross_modal"] is not None:
        cross = chain["cross_modal"]
        console.print(
            f"image-text matching: KL divergence {cross['kl_divergence']:.2g}, cosine gap {cross['cosine_gap']:.2g}"
        )
    judged = sum(len(component["arbitrated"]) for component in figures["components"])
    if judged:
        console.print(f"{judged} outputs on ill-conditioned inputs were judged by float64 (see report.json)")


def _worst(outputs: list[dict[str, float]]) -> list[str]:
    if not outputs:
        return ["-"] * 4
    return [
        f"{max(item['max_abs'] for item in outputs):.2g}",
        f"{max(item['max_rel'] for item in outputs):.2g}",
        f"{min(item['cosine'] for item in outputs):.7f}",
        f"{min(item['worst_channel_cosine'] for item in outputs):.6f}",
    ]


def _gate(gate: dict[str, float]) -> str:
    return ", ".join(f"{'<=' if name == 'max_abs' else '>='} {value:g}" for name, value in gate.items())
