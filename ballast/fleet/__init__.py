"""Read, check and change the fleet file, and make small fleets for demos and tests.

Packages from `kernels` up may import it; `cluster`, `server`, `sim`, `bench` and the command line
do. It imports `core` only.

- `changes`: Operators' changes to a fleet, stored as differences against its file.
- `cross_checks`: Checks that concern several keys of the file.
- `difference`: What must change so that a running server serves another fleet.
- `document`: YAML with `${ENV}` expansion, duplicate-key errors and key paths.
- `elsewhere`: Hints for keys that belong elsewhere in the fleet file.
- `faults`: Errors of the schema as sentences that name key, value and what is allowed.
- `file`: The fleet file as `FleetSettings`.
- `hub`: Download of checkpoints by hub id, without code.
- `kept`: The file in which operators' changes survive a restart.
- `levels`: Service levels and limits that may change while a model serves.
- `make`: Make a fleet of small checkpoints of real architectures, some trained here.
- `muon`: The Muon optimizer in float32.
- `plan`: Which small models a made fleet consists of.
- `schema`: The fleet file's keys, types and ranges, in pydantic.
- `source`: A server's fleet: its file together with operators' changes.
- `text`: Training text for small models.
- `tokenizer`: A byte-level BPE tokenizer with a chat template, trained in place.
- `train`: A plain next-token training loop on CPU.
- `whole`: Replace a file as a whole, under a lock.
"""
