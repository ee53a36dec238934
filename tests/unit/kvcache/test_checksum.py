from __future__ import annotations

import numpy as np

from libs.kvcache.checksum import block_checksum


def test_any_changed_byte_changes_the_checksum() -> None:
    rows = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    hurt = rows.copy()
    hurt[1, 2, 0] = np.nextafter(hurt[1, 2, 0], np.float32(0))
    assert block_checksum(rows) != block_checksum(hurt)


def test_the_layout_in_memory_does_not_matter() -> None:
    rows = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    assert block_checksum(np.asfortranarray(rows)) == block_checksum(rows)
