"""The version of Escalade, at the bottom, where everything can name it."""

VERSION = "0.1.0"
