"""Comparison of outputs, metrics and gates, sampled inputs, and the place where two models part."""
