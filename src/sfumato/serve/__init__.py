"""The HTTP service: a model and its galleries behind routes, with limits, keys and metrics. Needs the extra `serve`."""
