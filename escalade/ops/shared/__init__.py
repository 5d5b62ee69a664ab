"""What several operations share: rows of a matrix, elements one by one, windows over images."""
