"""A small HTTP service for a model and its galleries: search by text and image, with guarantees and a web page."""
