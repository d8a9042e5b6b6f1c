"""Define the messages between the server and the worker of one device.

One module for each job that server and worker do together; `codec` joins their messages in two
unions, one per direction, in which the class name is the tag of each member. Vocabulary of
`ballast.core` travels as it is, in fields.

- `admin_messages`: An operator's order, and how it ended.
- `codec`: The messages of each direction, to bytes and back.
- `lending_messages`: Pages lent between two workers, and which workers may lend to each other.
- `lifecycle_messages`: Start, state and end of a worker.
- `message`: The base class of all of them.
- `migration_messages`: A running request that moves to another device with its KV.
- `request_messages`: Requests to a worker, and their outputs.
"""
