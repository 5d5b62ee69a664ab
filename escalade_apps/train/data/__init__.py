"""Datasets in memory as bytes, read from files or synthetic."""

from escalade_apps.train.data.images import Dataset, Images
from escalade_apps.train.data.reading import read

__all__ = ["Dataset", "Images", "read"]
