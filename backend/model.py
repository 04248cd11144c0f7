"""Makes this folder a Triton Python-based backend: put it, or a link to it, in place of ``backends/vllm``."""

from triton_lifecycle.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
