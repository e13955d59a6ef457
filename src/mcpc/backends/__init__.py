"""What runs and builds graphs. Each backend keeps its runtime to itself."""
