"""Tables and plots, on the terminal and in the docs, from records."""
