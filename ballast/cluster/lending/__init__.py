"""Let the workers of one server lend pages to each other.

The server's end introduces workers that may lend to each other, forwards their messages, and delays
the successor of a dead worker until no other worker maps its memory. The worker's end fetches the
file descriptors of lent pages on threads of its own. Neither decides about leases: the devices'
policies decide which pages are lent and when they return.

- `lending_pairs`: Pairs of workers that may lend to each other now; in the server.
- `lending_peers`: Peers that lend to this worker or borrow from it; in each worker.
"""
