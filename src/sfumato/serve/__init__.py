"""A small HTTP service over a model and its galleries: search by text and image, with probabilities, promises and a web page."""
