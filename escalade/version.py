"""Version number, in a module of its own so that every other module can import it."""

VERSION = "0.1.0"
