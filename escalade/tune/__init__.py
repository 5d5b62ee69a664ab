"""Which rung and which config for a problem on a device."""

from escalade.tune.choose import Choice, choose

__all__ = ["Choice", "choose"]
