"""Import-only stand-in for SGLang's CPU kernels: without AMX no layer calls any of them."""

__version__ = "0.0.0"


def __getattr__(name):
    if name.startswith("__") or not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} was called")

    return missing
