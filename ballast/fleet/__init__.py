"""Read, check and change the fleet file, and make small fleets for demos and tests.

Packages from `kernels` up may import it; `cluster`, `server`, `sim`, `bench` and the command line
do. It imports `core` only.

- `atomic_file`: Replace a file as a whole, under a lock.
- `changes_file`: The file in which operators' changes survive a restart.
- `changes`: Operators' changes to a fleet, stored as differences against its file.
- `cross_checks`: Checks that concern several keys of the file.
- `document`: YAML with `${ENV}` expansion, duplicate-key errors and key paths.
- `entry_directory`: Find the directory of a checkpoint or adapter: a path, or a hub id.
- `faults`: Errors of the schema as sentences that name key, value and allowed values.
- `field_types`: Types of the fleet file's values: sizes, names, secrets.
- `fleet_draft`: Draft a fleet file of models that were found, by `ballast init`.
- `fleet_difference`: Compute the steps that turn a running server's fleet into another.
- `fleet_file`: The fleet file as `FleetSettings`.
- `fleet_source`: A server's fleet: its file together with operators' changes.
- `gguf_entry`: Make a checkpoint directory of a GGUF file.
- `gguf_header`: Parse the header of a GGUF file.
- `hub_download`: Watches and bounds a download from the hub.
- `hub`: Download of checkpoints by hub id, without code.
- `key_hints`: Suggest the fleet file's key for a misplaced or foreign one.
- `levels`: Convert service levels and limits that may change while a model serves.
- `make`: Make a fleet of small checkpoints of real architectures, some trained here.
- `model_recipes`: Define the small models of a made fleet.
- `model_search`: Find the models in folders or the hub's cache.
- `muon`: The Muon optimizer in float32.
- `schema`: The fleet file's keys, types and ranges, in pydantic.
- `smollm2`: Finds SmolLM2, a real small model, for made fleets.
- `text`: Training text for small models.
- `tokenizer`: A byte-level BPE tokenizer with a chat template, trained in place.
- `train`: A plain next-token training loop on CPU.
- `twins`: Serve an adapter that is added to a running server, by a twin of its base.
- `unfinished_download`: Recognize an unfinished download by what it leaves.
"""
