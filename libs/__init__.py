"""Shared code of the pod: cores' contract, hosts, bus, wire, fabric, model. Never imports
`services`.

Importing it settles two things that must be settled before numpy and tokenizers are imported: one
BLAS thread per process (more of them spin against each other and gain nothing at these sizes),
and no thread pool in the tokenizer, so that processes can be forked.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
