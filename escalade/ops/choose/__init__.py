"""Choice of rung and config: by name, by measurement, or by estimate."""
