"""A small HTTP service over a model and its galleries: search by text and image, with guarantees and a web page."""
