"""Other systems, measured in the same process as ours: one module per system, and a registry."""
