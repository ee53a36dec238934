"""What `xds up` starts: `python -m services.pod TOPOLOGY PACE PORT LOG CARRIER VALIDATE`."""

from __future__ import annotations

import sys

from libs.errors import BadInput, XdsError
from services.pod.options import UpOptions
from services.pod.supervisor import run_pod


def main() -> int:
    """Run a pod until told to stop; 0 stopped, 1 failed, 2 bad input."""
    topology, pace, port, log, carrier, validate = sys.argv[1:]
    options = UpOptions(topology, float(pace), int(port), log, carrier, validate == "1")
    try:
        return run_pod(options)
    except BadInput as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    except XdsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
