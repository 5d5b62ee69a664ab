"""Images to train on: read from files or made up, in memory as bytes."""

from escalade_apps.train.data.images import Dataset, Images
from escalade_apps.train.data.reading import read

__all__ = ["Dataset", "Images", "read"]
