"""Handle HTTP below any route: sockets, bodies, errors, streams, and the context of a request.

`server` alone imports it. It depends on no model, and on no API except for their error envelopes.

- `address`: The address that a server listens on, and who can reach it.
- `bodies`: Estimates the cost of JSON bodies before they are decoded.
- `connection_limits`: Bounds on the number of connections and on their idle time.
- `connection`: Event loop and HTTP parser in C, where installed.
- `cors`: Cross-origin requests.
- `faults`: Status codes and error bodies of each API.
- `fair_turns`: One piece of work at a time, on the loop or on a thread, API keys in turn.
- `fields`: Types of request fields, with their bounds.
- `file_limit`: The limit of open files.
- `json_list`: A JSON array that is encoded while it grows.
- `json_response`: Encoding of records, and error envelopes.
- `json_route`: Decodes JSON bodies, one in each turn of the event loop.
- `off_loop`: Threads for work that would block the event loop.
- `origins`: Refuses foreign hosts and origins: requests that web pages make browsers send.
- `refused_fields`: Refuses request fields that must not be ignored.
- `request_context`: The context of one HTTP request, from arrival to the end of its response.
- `route_match`: Finds the route of a request before anything is decided by it.
- `sliced_response`: Sends large bodies in slices.
- `sse`: Streams server-sent events; stops when the client disconnects.
- `watchdog`: Ends a server whose event loop hangs.
"""
