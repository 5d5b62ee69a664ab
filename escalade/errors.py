"""Exceptions. Each message says what was passed, what is supported and what to do."""


class EscaladeError(Exception):
    """Base class of all errors that Escalade raises on purpose."""


class UnsupportedError(EscaladeError, ValueError):
    """Unsupported input or problem."""


class CompileError(EscaladeError, RuntimeError):
    """Kernel source that the compiler rejected."""


class ToolError(CompileError):
    """Missing compiler, headers or disk space: no kernel can be compiled on this machine."""


class LaunchError(EscaladeError, RuntimeError):
    """Kernel that could not be launched, or failed while running."""


class OutOfMemory(EscaladeError, RuntimeError):
    """Request that needs more memory than is available."""


class TwinError(LaunchError):
    """Kernel bug found by the twin: a race, an out-of-bounds access, a deadlock."""


class MissingError(EscaladeError, ImportError):
    """Optional package that is not installed."""
