"""What kernels do on a GPU, in counters and in words: parts of a target, profilers' readings, and what they say."""
