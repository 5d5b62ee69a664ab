"""Every figure in README and docs, as units of work that are measured if missing or stale."""
