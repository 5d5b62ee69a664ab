"""The graph data structure, memory formats of values, and PyTorch operators by name."""
