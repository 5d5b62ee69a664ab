"""Single layers beside their peers: the convolutions of networks, each verified and then timed in one run."""
