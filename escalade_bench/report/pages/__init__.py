"""The pages, each a list of prose, tables and plots; the tables are those of the terminal too."""
