"""Pages lent to other devices' processes, and pages borrowed from them: bookkeeping and mappings.

Messages are returned and passed in; `ballast.transport` carries them.

- `borrower`: Pages of other devices in ranges of this one.
- `lender`: Leases of pages to other devices, their recalls and deadlines.
"""
