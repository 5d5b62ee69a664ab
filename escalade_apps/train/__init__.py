"""Training: images from files to the device, epochs of steps, and what is kept of them."""
