"""A drop-in for Triton's vLLM backend that manages each request's whole life."""

__version__ = "0.1.0"
