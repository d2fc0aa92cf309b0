"""Whether a link gives far less than it must, whatever the cause. Pure."""

from __future__ import annotations

LEAST_SHARE = 0.01  # of the most that the link gave since the node's first reads over it
LEAST_BYTES_PER_S = 2e9  # between GPUs of one host: TCP within a machine gives less, NVLink and PCIe give 20e9 and more


def why_slow(bytes_per_s: float, best_bytes_per_s: float, *, is_gpu: bool, is_one_host: bool) -> str:
    """Why the link counts as slow; "": it does not, or nothing is known (0).

    `best_bytes_per_s`: the most that it gave. `is_gpu`: the memory that is read into. `is_one_host`: the peer is
    advertised at the node's own address.
    """
    if not bytes_per_s:
        return ""
    if is_gpu and is_one_host and bytes_per_s < LEAST_BYTES_PER_S:
        return f"less than {LEAST_BYTES_PER_S / 1e9:g} GB/s between GPUs of one host"
    if bytes_per_s < LEAST_SHARE * best_bytes_per_s:
        return f"less than {LEAST_SHARE:.0%} of the {best_bytes_per_s / 1e9:.2g} GB/s that it gave"
    return ""
