"""Vector stores that search lifted vectors by squared Euclidean distance; none knows of Gaussians."""
