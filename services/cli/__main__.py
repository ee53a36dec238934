"""Entry point of `xds` (also `python -m services.cli`)."""

from __future__ import annotations

import libs  # noqa: F401 - settles BLAS threads before numpy is imported
from services.cli.app import app


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
