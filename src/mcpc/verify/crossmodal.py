"""Figures for models with a text and an image tower: do a package and its reference match the same pairs?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcpc.core.runner import Array

#: Acceptance figures of the project.
MAX_KL_DIVERGENCE = 0.18
MAX_COSINE_GAP = 0.09


@dataclass(frozen=True)
class CrossModal:
    """How the image-text matching of two models differs.

    Attributes:
        kl_divergence: Largest KL(reference || package), in nats, over the rows of both match distributions: texts
            given an image and images given a text (softmax of the scaled similarities).
        cosine_gap: Largest difference of one image-text cosine similarity.
    """

    kl_divergence: float
    cosine_gap: float

    def failures(self) -> list[str]:
        """Return the reasons why the figures miss the acceptance figures."""
        reasons = []
        if not self.kl_divergence < MAX_KL_DIVERGENCE:
            reasons.append(f"KL divergence {self.kl_divergence:.3g} is not below {MAX_KL_DIVERGENCE}")
        if not self.cosine_gap < MAX_COSINE_GAP:
            reasons.append(f"cosine gap {self.cosine_gap:.3g} is not below {MAX_COSINE_GAP}")
        return reasons


def cross_modal(logits: Array, reference_logits: Array, cosines: Array, reference_cosines: Array) -> CrossModal:
    """Compare two matchings of the same images and texts.

    Args:
        logits: Scaled similarities [images, texts] of the package.
        reference_logits: The same of the reference.
        cosines: Cosine similarities [images, texts] of the package.
        reference_cosines: The same of the reference.
    """
    rows = max(_kl(reference_logits, logits), _kl(reference_logits.T, logits.T))
    return CrossModal(rows, float(np.abs(cosines.astype(np.float64) - reference_cosines).max()))


def _log_softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _kl(p_logits: Array, q_logits: Array) -> float:
    """Return the largest KL(p || q) over rows. Source: Kullback and Leibler, 1951."""
    p, q = _log_softmax(p_logits), _log_softmax(q_logits)
    return float((np.exp(p) * (p - q)).sum(axis=-1).max())


def pairwise_cosines(image_embeds: Array, text_embeds: Array) -> Array:
    """Return cosine similarities [images, texts] of embeddings [images, P] and [texts, P].

    Where an image has several embeddings [images, rows, P], the best of them counts.
    """
    image = image_embeds / np.linalg.norm(image_embeds, axis=-1, keepdims=True)
    text = text_embeds / np.linalg.norm(text_embeds, axis=-1, keepdims=True)
    cosines = np.asarray(image @ text.T)
    return cosines.max(axis=1) if cosines.ndim == 3 else cosines
