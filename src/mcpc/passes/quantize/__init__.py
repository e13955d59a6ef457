"""Weight-only quantization to the canonical form: standard DequantizeLinear, symmetric, Linear weights stored [K,N]."""
