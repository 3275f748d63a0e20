"""The `quantguard` command."""


def main() -> int:
    """Entry point."""
    return 0
