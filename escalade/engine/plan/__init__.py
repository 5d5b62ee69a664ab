"""Plan a network for one batch size (kernels, buffers, arena offsets), and run the plan."""
