"""Let the workers of one server lend pages to each other.

The worker's end fetches the file descriptors of lent pages on threads of its own. Neither decides
about leases: fleet policies and operators do (`ballast.control.leases`), and lenders' memory
policies.

- `awaited_leases`: Leases whose dead workers coroutines await; in the server.
- `lending_peers`: Peers that lend to this worker or borrow from it; in each worker.
"""
