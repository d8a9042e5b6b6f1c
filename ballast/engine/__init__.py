"""Run one device with many models: state, plan, apply, loop, the same live and in virtual time.

Packages from `cluster` up may import it. It imports `models` and what is below; it cannot see
`transport`. Here policies and memory meet: `loop` asks, `apply` acts.

- `activation_rate`: Learned rate of bringing weights to the device.
- `admission`: Which requests a model can take, and when an output ends.
- `apply`: Apply a policy's actions; each may refuse, with a reason.
- `batch`: Running and paused requests of one model.
- `build`: Build one device's engine from memory, link, clock and models.
- `compiling`: Compile grammars on a thread beside the lanes.
- `compute_view`: The view of compute policies: which model could run which job.
- `cost_estimator`: Learned cost of a model's jobs.
- `device`: `LiveDevice`: memory, host tier, models and loop behind five methods.
- `events`: How each event changes the device's state.
- `grammarbook`: Which grammars are needed, compiled, or next.
- `head_start`: When a model's first job may begin while its weights still arrive.
- `inbox`: The live clock and the inbox of events.
- `jobs`: The end of a job: its tokens, KV, and what waited for it.
- `lanes`: Jobs that run at once, and each one's share of compute.
- `lending`: Leases of this device, as its loop handles them.
- `life`: A model's life on a device, as a state machine with a table of transitions.
- `loop`: One turn: take events, decide, apply, form a job, run it.
- `machine`: The parts of a live CPU device: memory, link, executors.
- `machine_cuda`: The parts of a live GPU.
- `migration`: Requests that leave for another device with their KV, and KV that arrives.
- `model`: One model on one device: weights, KV cache, costs, requests.
- `never_run`: GPU features that have only met stand-ins.
- `operate`: Operators' commands, carried out within the loop.
- `operator`: Operators' commands, carried out beside the loop: loading, then joining.
- `patience`: Deadlines of requests that wait for admission.
- `pausing`: Pause and resume of requests.
- `plan`: Form a model's next job: decodes, prefill chunks, admissions.
- `promises`: Pages reserved for models whose claims have been covered.
- `rehearsal`: Warm-up of a spare worker process.
- `report`: The `DeviceReport` of a device, read without stopping it.
- `runner`: The executor protocol, and lanes as CPU threads.
- `runner_cuda`: Lanes as GPU streams, each with its host thread.
- `snapshot`: The first entry of a story: the state that its turns depend on.
- `state`: `DeviceState`: what is true on one device.
- `storyfile`: A story as JSON lines in files of bounded size.
- `streams_cuda`: Streams of a GPU's lanes, with shares of its multiprocessors.
- `swapped`: The executor of a model whose KV is swapped.
- `swapping`: Jobs that change which layers' KV is swapped.
- `turning`: Change which layers rotate, or evict a model.
- `vacate`: Move KV out of borrowed pages that are recalled.
- `views`: `DeviceView` of a state, with only changed models made anew.
- `waiting`: The waiting queue of one model.
"""
