"""`python -m pytest_quantguard.emulator`: serve a model until SIGTERM or Ctrl-C."""

import sys

from pytest_quantguard.emulator.launch import run

if __name__ == "__main__":
    sys.exit(run())
