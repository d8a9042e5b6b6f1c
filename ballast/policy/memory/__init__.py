"""Decide about the memory of one device: what is resident, what is preempted, dropped or rotated.

A device's engine loop calls one of these policies. They import `core`, `policy.base`,
`policy.market` and `policy.supply`, and touch no memory: they return actions.

- `absences`: How long models with requests are absent, learned; those that came back stay a while.
- `arbiter`: Preset `ballast`: whatever harms least makes way, for whatever gains most.
- `balloon`: Preset `balloon`: one elastic pool; idle weights and cached prefixes make way.
- `defaults`: Decisions that all memory policies share, unless a policy overrides them.
- `host_direct`: Preset `c2cserve`: weights stay in host memory, the device holds KV (C2CServe).
- `kvswap`: Preset `kvswap`: KV swapped layer by layer instead of preemption (Pie).
- `layer_offers`: Layers as a source of pages: offers of remapping weights to KV (MIRAGE, 5.2, 5.3).
- `layer_reversion`: Claims by which models take back the layers that they gave up.
- `lru`: Preset `lru`: whole models with reserved KV while they fit (Ollama, llama.cpp's router).
- `mirage`: Preset `mirage`: layers give their memory to KV before requests are preempted.
- `quota_steps`: Steps by which quotas move from models of low use to models of high use.
- `quotas`: Preset `muxserve`: KV quotas of models that follow demand (MuxServe).
- `reactivation`: Bring evicted models back before they are requested.
- `recompute`: Preset `recompute`: fixed weights, preemption by recomputation (vLLM).
- `rotary`: Preset `superinfer`: requests ahead of their pace make way first (SuperInfer).
- `static`: Preset `static`: every model has a fixed share of the device.
- `swiftcache`: Preset `swiftcache`: KV staged on the host before work is undone (SwiftCache).
- `swap`: Preset `swap`: one whole model at a time has the device (QLM, llama-swap).
- `temporal_sharing`: Serve one model at a time in turns, with starvation bounds.
"""
