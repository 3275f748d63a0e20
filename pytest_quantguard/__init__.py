"""pytest-quantguard: a regression gate for quantized LLM servers."""

__version__ = "0.1.0"
