"""Let the workers of one server lend pages to each other.

The server's end introduces workers that may lend to each other, passes their messages on, and keeps
the successor of a dead worker waiting until nobody uses its memory any more. The worker's end
fetches what crosses as file descriptors, beside the main thread. What is lent and when it comes
back is decided by the devices.

- `lending_pairs`: Pairs of workers that may lend to each other now; in the server.
- `lending_peers`: Other workers that lend to this one, or borrow; in each worker.
"""
