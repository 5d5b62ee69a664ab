"""What a peer or a rung raises, and what is raised through it by whoever stops the whole run."""

from __future__ import annotations

from escalade.errors import ToolError


def reason(error: Exception) -> str:
    """Why it does not do what it was asked, in one line.

    A compiler or a pool of workers may turn an interrupt into an error of its own: that is nobody's refusal, and is
    raised here as what it was. So is what keeps every kernel from being compiled.
    """
    seen: set[int] = set()
    behind: BaseException | None = error
    while behind is not None and id(behind) not in seen:
        if not isinstance(behind, Exception) or isinstance(behind, ToolError):
            raise behind
        seen.add(id(behind))
        behind = behind.__cause__ or behind.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
