"""Classify images on many machines with Ray: Ray Data for stored images, Ray Serve for requests."""

from escalade.errors import MissingError

try:
    import ray.data  # noqa: F401
except ImportError as error:
    raise MissingError(
        f"classifying on many machines needs Ray, which cannot be imported ({error}): pip install 'escalade[ray]'"
    ) from error

from escalade_apps.ray.jobs import Job, Part
from escalade_apps.ray.prediction import Network, Predictor

__all__ = ["Job", "Network", "Part", "Predictor"]
