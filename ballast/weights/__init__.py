"""Read checkpoints into the host tier, and bring weights to devices as segments.

Packages from `models` up may import it. It imports `kernels`, `memory`, `isolation` and `core`; it
cannot see `kv`.

- `adapter`: LoRA adapters in PEFT's format, checked against their base model.
- `agreement`: Check that a module computes the same in our batches as in `transformers`.
- `architecture`: A decoder's sizes, tensors and attention windows.
- `assemble`: Assemble tensors of the module from tensors of the files.
- `buffers`: Buffers that checkpoints lack, such as rotary frequencies.
- `checkpoint`: Load a checkpoint's weights into the host tier.
- `config`: `config.json`, the generation config, and end-of-sequence tokens.
- `decoder_recipe`: How a Llama-like decoder's layers are computed, by features.
- `default_dtype`: PyTorch's default dtype, set for one thread.
- `findings`: Keeps what the examination of checkpoints found, by content.
- `finite`: Refuse weights that are NaN or infinite, by file, tensor and place.
- `generation_config`: Sampling parameters that a checkpoint recommends.
- `gguf_blocks`: Dequantise blocks of GGUF files.
- `gguf_config`: Configuration and tensor names of a GGUF header.
- `gguf_export`: The process that makes a checkpoint's small files from a GGUF header.
- `gguf_tensors`: Locate the tensors of GGUF files, without parsing their headers.
- `gguf_tokenizer`: Tokenizer files of a GGUF header.
- `host`: The host tier: weights packed in sealed memory, shared by all workers.
- `inspection`: Derive an architecture from its `transformers` module, or refuse the model.
- `load_order`: Order of a load behind which the first job can begin.
- `manifest`: A checkpoint's contents, checked before its weights are read.
- `meta_module`: The `transformers` module of a configuration, without memory.
- `module_pattern`: Linear-time patterns of module paths.
- `module_segments`: A module's tensors, divided into segments.
- `origin`: Identify a segment's bytes without reading them.
- `packing`: Memory layout of each tensor of a segment: as stored, or panel-packed.
- `packing_experts`: Memory layout of a layer's experts.
- `page_size`: Choose the page size of CPU devices by the size of their models.
- `pooling`: Detect embedding models by their sentence-transformers files.
- `probe`: Find what a decoder requires of attention, on the meta device.
- `promotion`: Segments read in place, copied to pages beside the passes that read them.
- `quantisation`: Package: quantised matrices of safetensors: their tensors and their rows.
- `recipe_agreement`: Check that a module computes what its recipe says.
- `recipe_search`: Find a decoder's recipe from its tensors and parts.
- `residency`: One model's weights on one device: absent, loading, resident, rotating.
- `sealed`: A host-tier segment: a memfd that is filled, sealed, and mapped read only.
- `sealed_model`: Find a loaded model again by its sealed segments, without its files.
- `segment_exchange`: The protocol by which processes share segments and models.
- `segment`: Segments: tensors of one layer, packed one after the other.
- `segment_mapping`: What is mapped beneath a model's segments: pages, or host memory.
- `segment_table`: Places of a model's segments in its range of device addresses.
- `sharding`: Division of each tensor over tensor-parallel ranks.
- `shared`: Segments that several models contain, on the device once.
- `slots`: Pages that rotating layers of a model share.
- `source_files`: Identify the files that a model was loaded from.
- `stored_tensor`: A tensor stored in a file.
- `stored`: Tensors in safetensors and GGUF files, located by their headers.
- `support_checks`: Refusal of models that cannot be served, with reasons.
- `tokenizer_files`: The files that make up a tokenizer, and a digest of them.
- `weight_stream`: How weights that rotate or arrive stream behind jobs (MIRAGE, 4.1, 5.4).
- `weightless`: Modules without weights, for checks at any size.
"""
