"""Which rung and which config do a problem: asked for, measured, or estimated."""
