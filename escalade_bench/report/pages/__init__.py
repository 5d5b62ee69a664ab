"""The pages, each a list of prose, tables and plots; the terminal shows the same tables."""
