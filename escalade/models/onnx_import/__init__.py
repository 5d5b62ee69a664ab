"""ONNX files as PyTorch modules: a small reader for the operators of convolutional networks."""
