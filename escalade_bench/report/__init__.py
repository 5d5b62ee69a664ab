"""Records as tables and plots: on a terminal, in README.md and docs, and as one HTML page."""
