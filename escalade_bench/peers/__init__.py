"""Other systems, measured beside ours in the same process: one module a system, and the registry of them all."""
