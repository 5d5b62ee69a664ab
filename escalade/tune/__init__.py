"""Tables of measured choices, filled and judged: `search` measures, `sweep` and `samples` gather, `judge` compares."""
