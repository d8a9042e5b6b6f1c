"""Define the messages between the server and the worker of one device.

One module per purpose; `codec` joins their messages in two unions, one per direction, in which the
class name is the tag of each member. Dataclasses of `ballast.core` are sent as fields of messages.

- `admin_messages`: An operator's command, and its outcome.
- `codec`: Encoding and decoding of the messages of each direction.
- `lending_messages`: Pages lent between two workers, and which workers may lend to each other.
- `lifecycle_messages`: Start, state and end of a worker.
- `message`: The base class of all messages.
- `migration_messages`: A running request that moves to another device with its KV.
- `request_messages`: Requests to a worker, and their outputs.
"""
