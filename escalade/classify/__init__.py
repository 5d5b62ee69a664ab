"""Image files through a classifier: found, decoded in threads, streamed through an engine, labelled."""

from escalade.classify.prediction import Guess, Prediction, predict

__all__ = ["Guess", "Prediction", "predict"]
