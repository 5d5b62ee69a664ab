"""Applications built on Escalade: classify images, on one machine or on many, and train networks."""
