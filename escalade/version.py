"""Version number and address of the project, in a module of its own so that every other module can import it."""

VERSION = "0.1.0"
URL = "https://github.com/escalade-kernels/escalade"
