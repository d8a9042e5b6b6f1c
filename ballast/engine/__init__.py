"""Run one device with many models: state, plan, apply, loop, the same live and in virtual time.

Packages from `live` up may import it. It imports `models` and what is below; it cannot see
`transport`. Here policies and memory meet: `loop` asks, `apply` acts.

- `activation_rate`: Learned rate of bringing weights to the device.
- `admission`: Checks of new requests, and the end of an output.
- `apply`: Apply a policy's actions; each may refuse, with a reason.
- `batch`: Running and paused requests of one model.
- `build`: Build one device's engine from memory, link, clock and models.
- `commands`: Operators' commands, carried out within the loop.
- `compute_view`: The view of compute policies: which model could run which job.
- `cost_estimator`: Learned cost of a model's jobs.
- `decider`: Ask the memory and admission policies, and apply what they decide.
- `dispatcher`: Start jobs: choose a model, form its next job, hand it to the runner.
- `events`: How each event changes the device's state.
- `head_start`: When a model's first job may begin while its weights still arrive.
- `jobs`: The end of a job: its tokens, its KV, and actions that waited for it.
- `kv_tiers`: Look-ups, fetches and stores of KV in tiers below the device.
- `lanes`: Jobs that run at once, and each one's share of compute.
- `layer_remap`: Change which layers rotate, or evict a model.
- `layer_stream`: What streams a model's layers, as the engine makes and calls it.
- `leaps`: Account for many decode steps at once, in virtual time.
- `lending`: Leases of pages with other devices, as this device's loop handles them.
- `life_rules`: The states of a model's life, and the table of its transitions.
- `life`: A model's life on a device, as a state machine.
- `loop`: One turn: take events, decide, dispatch jobs, send outputs.
- `migration`: Export and import of running requests' KV between devices.
- `model`: One model on one device: weights, KV cache, costs, requests.
- `pausing`: Pause and resume of requests.
- `places`: Change which segments passes read in host memory, while a model stays.
- `plan`: Form a model's next job: decodes, prefill chunks, admissions.
- `promises`: Pages reserved for models whose claims have been covered.
- `quarantine`: Set aside models whose requests fail with non-finite numbers.
- `queue_deadlines`: Deadlines of requests that wait for admission.
- `report`: The `DeviceReport` of a device, read without stopping it.
- `reside`: Carry a model's residency plan out, whole, or refuse it.
- `return_borrowed`: Move KV out of borrowed pages that are recalled, or that steps wait for.
- `sizing`: Memory set aside for jobs, and the check that models fit beside it.
- `staging`: Blocks of KV that jobs copy to the host, read from there, and bring home.
- `state`: `DeviceState`: all facts of one device.
- `story_file`: A story as JSON lines in files of bounded size.
- `story_snapshot`: The first entry of a story: the state that its turns depend on.
- `views`: `DeviceView` of a state, with only changed models made anew.
- `waiting`: The waiting queue of one model, in which tenants take turns.
"""
