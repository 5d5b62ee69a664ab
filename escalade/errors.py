"""What can go wrong, each with a sentence that says what was given, what is supported and what to do."""


class EscaladeError(Exception):
    """The base of every error that Escalade raises on purpose."""


class UnsupportedError(EscaladeError, ValueError):
    """The input, or the problem it describes, is outside what is supported."""


class CompileError(EscaladeError, RuntimeError):
    """A kernel's source was refused by its compiler."""


class ToolError(CompileError):
    """No kernel can be compiled here, whichever it is: a compiler, its headers or the room that it needs is missing."""


class LaunchError(EscaladeError, RuntimeError):
    """A kernel could not be started, or failed while it ran."""


class OutOfMemory(EscaladeError, RuntimeError):
    """What was asked for needs more memory than there is."""


class TwinError(LaunchError):
    """A kernel did something wrong on the twin: a race, an overrun, a deadlock."""


class MissingError(EscaladeError, ImportError):
    """A package that is no dependency, and that what was asked for needs."""
