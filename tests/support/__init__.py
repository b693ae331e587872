"""Helpers of the tests: toy data, slow reference implementations and shared contracts."""
