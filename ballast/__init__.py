"""Ballast: many language models served from one elastic pool of device memory."""

__version__ = "0.1.0"
