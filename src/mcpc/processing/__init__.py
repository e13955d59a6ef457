"""Media and text to graph inputs, driven by the manifest. Pillow, numpy and tokenizers only."""
