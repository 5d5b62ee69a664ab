"""Tables of measured choices: `search` measures, `sweep` and `samples` gather, `judgement` compares."""
