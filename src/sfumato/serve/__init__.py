"""A small HTTP service over a model and its galleries: search by text and picture, with probabilities, promises and a web page."""
