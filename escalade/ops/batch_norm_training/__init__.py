"""Batch normalisation in training: `batch_norm_training` is the operator, `BatchNormTraining` the operation."""

from escalade.ops.batch_norm_training.op import batch_norm_training
from escalade.ops.batch_norm_training.operation import BATCH_NORM_TRAINING, BatchNormTraining
from escalade.ops.batch_norm_training.problem import BatchNormTrainingProblem

__all__ = ["BATCH_NORM_TRAINING", "BatchNormTraining", "BatchNormTrainingProblem", "batch_norm_training"]
