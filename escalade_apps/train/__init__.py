"""Train networks: datasets, batches on the device, training steps, checkpoints and logs."""
