"""docs/plans.md: plans for making networks fast as they are written down beforehand, and what each step has brought."""
