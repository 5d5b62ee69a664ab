"""Images through classifiers on many machines, by Ray: Ray Data for what is stored, Ray Serve for what comes in."""

from escalade.errors import MissingError

try:
    import ray.data  # noqa: F401
except ImportError as error:
    raise MissingError(
        f"Ray is needed to classify on many machines, and is not here ({error}): pip install 'escalade[ray]'"
    ) from error

from escalade_apps.ray.jobs import Job, Part
from escalade_apps.ray.prediction import Network, Predictor

__all__ = ["Job", "Network", "Part", "Predictor"]
