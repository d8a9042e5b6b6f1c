"""Pages lent to other devices' processes, and pages borrowed from them: bookkeeping and mappings.

Messages are returned and passed in; `ballast.transport` carries them.

- `borrower`: Pages of other devices, mapped in this one's window for its KV caches.
- `lender`: Leases of pages to other devices, their recalls and deadlines.
"""
