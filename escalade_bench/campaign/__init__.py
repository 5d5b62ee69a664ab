"""Every figure that README and docs show, as units of work that are measured when they are missing or overtaken."""
