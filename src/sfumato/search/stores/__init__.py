"""Vector stores that search lifted vectors by squared Euclidean distance; they do not depend on Gaussians."""
